"""Watts that a GPU draws while something runs, from NVIDIA's management library."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

INTERVAL_SECONDS = 0.01
Sample = tuple[float, float]
"""Seconds, and a reading: joules since the driver was loaded, or watts."""


class PowerMeter:
    """Samples in a thread of its own between enter and exit; the GPU should be busy for all of that time.

    Reads the GPU's energy counter where it has one, else its momentary power.
    """

    def __init__(self, read: Callable[[], float], counts_energy: bool) -> None:
        self._read, self._counts_energy = read, counts_energy
        self._samples: list[Sample] = []
        self._stop = threading.Event()

    def __enter__(self) -> PowerMeter:
        self._samples.clear()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._samples.append((time.perf_counter(), self._read()))
            if self._stop.wait(INTERVAL_SECONDS):
                return

    def watts(self) -> float | None:
        """Mean power of the last measurement, None if it was too short to tell."""
        return energy_slope(self._samples) if self._counts_energy else mean_reading(self._samples)


def energy_slope(samples: Sequence[Sample]) -> float | None:
    """Watts between the first and the last tick of an energy counter, which moves in steps of up to 100 ms."""
    ticks = [later for earlier, later in zip(samples, samples[1:], strict=False) if later[1] != earlier[1]]
    if len(ticks) < 2:
        return None
    return (ticks[-1][1] - ticks[0][1]) / (ticks[-1][0] - ticks[0][0])


def mean_reading(samples: Sequence[Sample]) -> float | None:
    """Mean of momentary power; the first half is left out, where the reading still rises."""
    late = [reading for _, reading in samples[len(samples) // 2 :]]
    return sum(late) / len(late) if late else None


def open_power_meter() -> PowerMeter | None:
    """A meter of the current CUDA device, or None where the driver does not tell."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(_uuid(), ctypes.byref(handle)):
            return None
    except OSError:
        return None

    def reading(function: str, unit: ctypes.c_uint | ctypes.c_ulonglong) -> Callable[[], float] | None:
        call = getattr(library, function, None)
        if call is None or call(handle, ctypes.byref(unit)):
            return None

        def read() -> float:
            call(handle, ctypes.byref(unit))
            return unit.value / 1e3  # of millijoules or milliwatts

        return read

    if energy := reading("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()):
        return PowerMeter(energy, counts_energy=True)
    if power := reading("nvmlDeviceGetPowerUsage", ctypes.c_uint()):
        return PowerMeter(power, counts_energy=False)
    return None


def _uuid() -> bytes:
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
