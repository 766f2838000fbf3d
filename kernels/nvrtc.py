"""Compiles CUDA C++ sources at first use, for the device at hand, and caches the kernels for the process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class TensorMap(ctypes.Structure):
    """A matrix that a kernel copies box by box (CUtensorMap), passed by value."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


Argument = Tensor | TensorMap | int | None  # integers are 32 bits wide, None is a null pointer


@dataclass(frozen=True)
class Kernel:
    """A kernel loaded on one device."""

    compiled: Any
    shared_bytes: int

    def __call__(self, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Argument]) -> None:
        """Launch on the current stream.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        values = [_value(argument) for argument in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(
                self.compiled.func, *grid, *block, ctypes.c_uint(self.shared_bytes), stream, pointers, None
            ),
            "cuLaunchKernel",
        )


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
    return Kernel(compiled, shared_bytes)


def describe_bytes(matrix: Tensor, rows: int) -> TensorMap:
    """A matrix of bytes in boxes [rows, 128], which land in shared memory swizzled over 128 bytes.

    Args:
        matrix: contiguous [height, width] of a type of one byte on a CUDA device; width a multiple of 16.
            Parts of a box outside of it read as zeros.

    Raises:
        RuntimeError: the driver refuses it.
    """
    height, width = matrix.shape
    described = (ctypes.c_uint8 * 192)()  # of which 128 bytes at an address that 64 divides
    aligned = (ctypes.addressof(described) + 63) // 64 * 64
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(0),  # CU_TENSOR_MAP_DATA_TYPE_UINT8
        ctypes.c_uint32(2),
        ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(width, height),
        (ctypes.c_uint64 * 1)(width),
        (ctypes.c_uint32 * 2)(128, rows),
        (ctypes.c_uint32 * 2)(1, 1),
        ctypes.c_int(0),  # CU_TENSOR_MAP_INTERLEAVE_NONE
        ctypes.c_int(3),  # CU_TENSOR_MAP_SWIZZLE_128B
        ctypes.c_int(3),  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        ctypes.c_int(0),  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    )
    _check(result, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, 128))


def _value(argument: Argument) -> Any:
    if isinstance(argument, TensorMap):
        return argument
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, call: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {call}: {(text.value or b'unknown error').decode()} ({result})")
