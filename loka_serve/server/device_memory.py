"""What the engine process knows of its GPU's memory, for the metrics; nothing on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

from loka_serve.server.messages import DeviceMemory

EVERY_SECONDS = 10.0

ReadMemory = Callable[[], DeviceMemory | None]


class MemoryWatch:
    """Reads the memory at most every few seconds, between batches: nobody else may call the device meanwhile."""

    def __init__(self, read: ReadMemory, every_seconds: float = EVERY_SECONDS) -> None:
        self._read, self._every = read, every_seconds
        self._next = 0.0

    def read(self, at_once: bool = False) -> DeviceMemory | None:
        """A new reading, or None if it is not yet time for one, or there is none to have."""
        now = time.monotonic()
        if now < self._next and not at_once:
            return None
        self._next = now + self._every
        return self._read()


def read_device_memory(device: str) -> DeviceMemory | None:
    """Bytes of a CUDA device: what this process's allocator holds, what is used by all, what there is."""
    if not device.startswith("cuda"):
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(torch.cuda.memory_reserved(device), total - free, total)
