"""Which implementation runs an operation at a shape: measured once on the GPU, then a fixed table."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .linear.implementations import IMPLEMENTATIONS, RECIPES, default_implementation, implementations_for
from .linear.libraries import deep_gemm_version
from .linear.tilings import TILINGS
from .linear.workload import time_implementations

logger = logging.getLogger(__name__)

OUT_DTYPES = {"linear": torch.bfloat16, "linear_float32": torch.float32}
"""The operations that are measured, and what they give."""


@dataclass(frozen=True)
class Environment:
    """What a measurement holds for: another GPU, driver or version of a library may choose otherwise."""

    gpu: str | None
    driver: str | None
    cuda: str | None
    pytorch: str
    triton: str | None
    deep_gemm: str | None

    @classmethod
    def current(cls, device: torch.device | str) -> Environment:
        """Of this process and device."""
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        return cls(
            gpu=torch.cuda.get_device_name(device) if on_gpu else None,
            driver=_driver() if on_gpu else None,
            cuda=torch.version.cuda,
            pytorch=torch.__version__,
            triton=_triton_version(),
            deep_gemm=deep_gemm_version() if on_gpu else None,
        )

    def differences(self, other: Environment) -> str:
        """What differs, as text for a log; empty if nothing does."""
        mine, its = asdict(self), asdict(other)
        return ", ".join(f"{name} {mine[name]} here but {its[name]} there" for name in mine if mine[name] != its[name])


@dataclass(frozen=True, order=True)
class Shape:
    """One entry's key: an operation of `OUT_DTYPES` in a recipe, weight [n, k], at so many rows."""

    op: str
    recipe: str
    n: int
    k: int
    rows: int


@dataclass(frozen=True)
class Entry:
    """What was measured at a shape.

    Attributes:
        us: microseconds of each implementation that agrees with the reference, fastest first.
        bf16_us: of the fastest BF16 implementation at that shape; None where none ran.
    """

    us: Mapping[str, float]
    bf16_us: float | None


@dataclass(frozen=True)
class Dispatch:
    """The table. Without entries it chooses defaults, and `reason` says why it has none.

    Attributes:
        reason: empty, or why there is no measurement: for a log line and a metric.
    """

    device: torch.device
    environment: Environment
    entries: Mapping[Shape, Entry] = field(default_factory=dict)
    reason: str = ""

    @classmethod
    def unmeasured(cls, device: torch.device | str, reason: str = "not measured") -> Dispatch:
        """A table of defaults: torch or Triton on CUDA, the reference elsewhere."""
        return cls(torch.device(device), Environment.current(device), {}, reason)

    @classmethod
    def measure(cls, shapes: Iterable[Shape], device: torch.device | str) -> Dispatch:
        """Times all implementations of these shapes, and their BF16 twins, on this device.

        Raises ValueError for an operation or a recipe that does not exist, and for a device without CUDA.
        """
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: dispatch is measured on a CUDA device, got {device}")
        timed: dict[Shape, dict[str, float]] = {}

        def times(shape: Shape) -> dict[str, float]:
            if shape not in timed:
                timed[shape] = _time(shape, device)
            return timed[shape]

        entries = {}
        for shape in sorted(set(shapes)):
            us = times(shape)
            twin = times(Shape(shape.op, "bf16", shape.n, shape.k, shape.rows))
            if us:
                entries[shape] = Entry(us, min(twin.values(), default=None))
            else:
                logger.warning("dispatch: nothing computes %s; its default stays", shape)
        return cls(device, Environment.current(device), entries)

    @classmethod
    def load(cls, path: Path, device: torch.device | str) -> Dispatch:
        """The saved table if it was measured in this environment; otherwise a warning and defaults with a `reason`."""
        device = torch.device(device)
        environment = Environment.current(device)
        try:
            saved = json.loads(path.read_text())
            measured_in = Environment(**saved["environment"])
            if not isinstance(saved["entries"], list):
                raise ValueError(f"entries: expected a list, got {saved['entries']!r}")
            entries = dict(_parse_entry(f"entries[{index}]", entry) for index, entry in enumerate(saved["entries"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            reason = f"{path} is no dispatch table: {type(error).__name__}: {error}"
        else:
            differences = environment.differences(measured_in)
            if not differences:
                return cls(device, environment, entries)
            reason = f"{path} was measured elsewhere: {differences}"
        logger.warning("dispatch: %s", reason)
        return cls(device, environment, {}, reason)

    def save(self, path: Path) -> None:
        """Writes the table as JSON, so that a reader never sees half of it."""
        entries = [{"shape": asdict(shape), **asdict(entry)} for shape, entry in sorted(self.entries.items())]
        text = json.dumps({"environment": asdict(self.environment), "entries": entries}, indent=1)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text + "\n")
        partial.replace(path)

    def covers(self, shapes: Iterable[Shape]) -> bool:
        """Whether each of these shapes was measured."""
        return all(shape in self.entries for shape in shapes)

    def entry(self, op: str, recipe: str, n: int, k: int, rows: int) -> Entry | None:
        """The entry that decides for so many rows: of the smallest bucket that holds them, else of the largest."""
        buckets = sorted(
            shape.rows for shape in self.entries if (shape.op, shape.recipe, shape.n, shape.k) == (op, recipe, n, k)
        )
        if not buckets:
            return None
        bucket = next((bucket for bucket in buckets if bucket >= rows), buckets[-1])
        return self.entries[Shape(op, recipe, n, k, bucket)]

    def choose(self, op: str, recipe: str, n: int, k: int, rows: int) -> str:
        """The implementation to run; a name for `linear.implementations.linear`. For build and capture time.

        Raises ValueError for an operation or a recipe that does not exist.
        """
        out_dtype = _out_dtype(op)
        default = default_implementation(recipe, rows, n, k, self.device, out_dtype)
        entry = self.entry(op, recipe, n, k, rows)
        if entry is None:
            return default
        # Tilings compute any number of rows; of the libraries, some take what the bucket has but not these rows.
        usable = implementations_for(recipe, rows, n, k, self.device, out_dtype)
        return next((name for name in entry.us if name in usable or name in TILINGS), default)


def _parse_entry(where: str, entry: Any) -> tuple[Shape, Entry]:
    """One saved entry; raises ValueError, which names the place, or what its missing parts raise."""
    shape, us, bf16_us = Shape(**entry["shape"]), entry["us"], entry["bf16_us"]
    _check_word(f"{where}.shape.op", shape.op, tuple(OUT_DTYPES))
    _check_word(f"{where}.shape.recipe", shape.recipe, RECIPES)
    for name in ("n", "k", "rows"):
        size = getattr(shape, name)
        if type(size) is not int or size < 1:
            raise ValueError(f"{where}.shape.{name}: expected a whole number from 1, got {size!r}")
    if not isinstance(us, dict) or not us:
        raise ValueError(f"{where}.us: expected microseconds by implementation, got {us!r}")
    for name, value in us.items():
        _check_word(f"{where}.us", name, IMPLEMENTATIONS)
        _check_duration(f"{where}.us.{name}", value)
    if bf16_us is not None:
        _check_duration(f"{where}.bf16_us", bf16_us)
    return shape, Entry({name: float(value) for name, value in us.items()}, None if bf16_us is None else float(bf16_us))


def _check_word(where: str, word: Any, expected: tuple[str, ...]) -> None:
    if word not in expected:
        raise ValueError(f"{where}: expected one of {', '.join(expected)}, got {word!r}")


def _check_duration(where: str, us: Any) -> None:
    if type(us) not in (int, float) or not (math.isfinite(us) and us > 0):
        raise ValueError(f"{where}: expected microseconds above 0, got {us!r}")


def _time(shape: Shape, device: torch.device) -> dict[str, float]:
    arguments = shape.recipe, shape.rows, shape.n, shape.k, device, _out_dtype(shape.op)
    names = implementations_for(*arguments)
    timings = sorted(time_implementations(names, *arguments, repeats=11), key=lambda timing: timing.us)
    return {timing.implementation: round(timing.us, 3) for timing in timings}


def _out_dtype(op: str) -> torch.dtype:
    if op not in OUT_DTYPES:
        raise ValueError(f"op: expected one of {', '.join(OUT_DTYPES)}, got {op!r}")
    return OUT_DTYPES[op]


@functools.cache
def _driver() -> str | None:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)
