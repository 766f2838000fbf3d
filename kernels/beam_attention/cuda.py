"""Beam attention on an E4M3 context in CUDA C++ on Hopper, see `beam_attention_fp8.cu`."""

from __future__ import annotations

import math
import struct
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from ..nvrtc import Argument, Kernel, compile_kernel, describe_bytes
from .configurations import WarpSpecialized
from .reference import Fp8Context
from .triton_schedule import merge_kernel

SOURCE = Path(__file__).with_name("beam_attention_fp8.cu")
HEAD_DIM = 128
TILE_ROWS, BLOCK_SLOTS = 128, 128
THREADS = 384
# Five stages of keys and values with their barriers, queries and their largest magnitudes of two warp groups, and what
# it takes to align them to 1 KiB.
SHARED_BYTES = 5 * (2 * 128 * 128 + 24) + 2 * 64 * (128 + 4) + 1024
MERGE_ROWS = 16


def warp_specialized_takes(head_dim: int, device: torch.device) -> bool:
    """Whether the kernel runs heads of this width on this device."""
    return head_dim == HEAD_DIM and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def beam_attention_fp8(
    query: Tensor,
    context: Fp8Context,
    lengths: Tensor,
    beam_counts: Tensor,
    scale: float,
    out: Tensor,
    configuration: WarpSpecialized,
) -> None:
    """As `triton.beam_attention_fp8`, for heads of 128, into `out`; the arguments are checked there.

    Raises:
        RuntimeError: the source does not compile, or the driver refuses the launch.
    """
    batch, beams, heads, _ = query.shape
    groups, slots, width = context.keys.shape[1:]
    index = query.device.index
    tiles = batch * groups * triton.cdiv(beams * heads // groups, TILE_ROWS)
    programs = tiles
    if configuration.split:
        most = tiles * triton.cdiv(triton.cdiv(slots, BLOCK_SLOTS), configuration.least_blocks)
        programs = min(_multiprocessors(index), most)
    if not programs:
        return
    parts = [2 * programs * TILE_ROWS] if configuration.split else [0]
    workspace = [torch.empty(*shape, device=query.device) for shape in ([*parts, width], parts, parts)]
    exponents = scale * math.log2(math.e)
    arguments: list[Argument] = [
        query,
        describe_bytes(context.keys.view(-1, width), BLOCK_SLOTS),
        describe_bytes(context.values.view(-1, slots), width),
        context.key_scale,
        context.value_scale,
        lengths,
        beam_counts,
        out,
        *workspace,
        batch,
        beams,
        slots,
        struct.unpack("i", struct.pack("f", exponents))[0],
    ]
    macros = definitions(groups, heads // groups, configuration)
    kernel: Kernel = compile_kernel(SOURCE, "beam_attention_fp8", macros, index, SHARED_BYTES)
    kernel(grid=(programs, 1, 1), block=(THREADS, 1, 1), args=arguments)
    if configuration.split:
        merge_kernel[(programs, triton.cdiv(TILE_ROWS, MERGE_ROWS))](
            context.value_scale,
            lengths,
            beam_counts,
            out,
            *workspace,
            batch,
            beams,
            GROUPS=groups,
            HEADS_PER_GROUP=heads // groups,
            HEAD_DIM=width,
            WIDTH=width,
            FP8=True,
            MIN_BLOCKS=configuration.least_blocks,
            BLOCK_M=TILE_ROWS,
            BLOCK_N=BLOCK_SLOTS,
            MERGE_ROWS=MERGE_ROWS,
        )


def definitions(groups: int, heads_per_group: int, configuration: WarpSpecialized) -> tuple[tuple[str, int], ...]:
    """The macros of one shape."""
    return (
        ("GROUPS", groups),
        ("HEADS_PER_GROUP", heads_per_group),
        ("SPLIT", int(configuration.split)),
        ("MIN_BLOCKS", configuration.least_blocks),
    )


@cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count
