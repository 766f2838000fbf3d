"""The two grouped GEMMs in fp8_block on Hopper: warps that copy beside warps that multiply, see `grouped_linear.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..nvrtc import Argument, Kernel, compile_kernel, describe_bytes
from ..quantize.triton import BLOCK_SCALES, allocate_scales
from .reference import SortedRows

SOURCE = Path(__file__).with_name("grouped_linear.cu")
BLOCK_M = 128
THREADS = 384
BOX_ROWS = 64
# Four stages of 128 rows of inputs and 256 of weights, their scales, 2 KiB for each of eight warps, the barriers, and
# what it takes to align them to 1 KiB.
SHARED_BYTES = 4 * (384 * 128 + 130 * 4 + 16) + 8 * 2048 + 1024 + 1024


@dataclass(frozen=True)
class WarpSpecialized:
    """How a GEMM runs in this kernel.

    Attributes:
        group_m: blocks of rows that pass over the weights together, so that a weight tile is read once into L2.
    """

    group_m: int = 8

    @property
    def block_m(self) -> int:
        return BLOCK_M


def warp_specialized_takes(weight: Tensor, weight_scale: Tensor | None) -> bool:
    """Whether the kernel takes such weights: fp8_block, whole tiles of 128 x 128 (of the gate, too), on Hopper."""
    return (
        weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
        and weight_scale is not None
        and weight_scale.ndim == 3
        and weight.shape[1] % 128 == 0
        and weight.shape[2] % 128 == 0
    )


def warp_specialized_linear(
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    rows: SortedRows,
    implementation: WarpSpecialized,
    swiglu: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `experts.gate_up_swiglu` with `quantize` (`swiglu`), or as `experts.expert_linear`.

    Raises:
        RuntimeError: the source does not compile, or the driver refuses the launch.
    """
    experts, channels, inner = weight.shape
    width = channels // 2 if swiglu else channels
    blocks = len(rows.expert_of_block)
    out = x.new_empty(blocks * BLOCK_M, width, dtype=torch.float8_e4m3fn if swiglu else torch.bfloat16)
    out_scale = allocate_scales(len(out), width, BLOCK_SCALES, x.device) if swiglu else None
    if not blocks:
        return out, out_scale
    index = x.device.index
    tiles = blocks * -(-width // (128 if swiglu else 256))
    arguments: list[Argument] = [
        x,
        scale,
        scale.stride(0),
        scale.stride(1),
        describe_bytes(weight.view(experts * channels, inner), BOX_ROWS),
        weight_scale,
        rows.tokens,
        rows.expert_of_block,
        rows.block_count,
        out,
        out_scale,
        out_scale.stride(0) if out_scale is not None else 0,
        out_scale.stride(1) if out_scale is not None else 0,
    ]
    _kernel(inner, channels, swiglu, implementation.group_m, index)(
        grid=(min(tiles, _multiprocessors(index)), 1, 1), block=(THREADS, 1, 1), args=arguments
    )
    return out, out_scale


def _kernel(inner: int, channels: int, swiglu: bool, group_m: int, device_index: int) -> Kernel:
    return compile_kernel(
        SOURCE, "grouped_linear", definitions(inner, channels, swiglu, group_m), device_index, SHARED_BYTES
    )


def definitions(inner: int, channels: int, swiglu: bool, group_m: int) -> tuple[tuple[str, int], ...]:
    """The macros of one shape."""
    return (("K", inner), ("N", channels), ("SWIGLU", int(swiglu)), ("GATHER", int(swiglu)), ("GROUP_M", group_m))


@cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count
