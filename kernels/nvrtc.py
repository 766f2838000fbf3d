"""Compiles CUDA C++ sources at first use, for the device at hand, and caches the kernels for the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

Kernel = Callable[..., None]  # kernel(grid=, block=, args=): on the current stream; integers are 32 bits wide


@cache
def compile_kernel(
    source: Path, name: str, definitions: tuple[tuple[str, int], ...], device_index: int, shared_bytes: int = 0
) -> Kernel:
    """The kernel `name` of a `.cu` file whose entry points are `extern "C"`.

    Args:
        definitions: preprocessor macros, which are the kernel's compile-time configuration.
        shared_bytes: dynamic shared memory of every launch.
        device_index: CUDA device that the kernel is loaded on.

    Raises:
        RuntimeError: NVRTC's log, if the source does not compile.
    """
    with torch.cuda.device(device_index):
        major, minor = torch.cuda.get_device_capability(device_index)
        # Hopper's own instructions need the target with the suffix "a".
        target = f"{major}{minor}a" if major == 9 else f"{major}{minor}"
        options = ["--std=c++17", f"-I{source.parent}", *(f"-D{macro}={value}" for macro, value in definitions)]
        compiled: Any = torch.cuda._compile_kernel(  # type: ignore[attr-defined]
            source.read_text(), name, compute_capability=target, nvcc_options=options
        )
        if shared_bytes:
            compiled.set_shared_memory_config(shared_bytes)
    return partial(compiled, shared_mem=shared_bytes)
