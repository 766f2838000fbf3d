"""Rounding to BF16, or to E4M3 with a scale a row or a block: the end of every kernel that produces activations.

Codes and scales equal those of `reference` bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tilings import RowTiling, row_tiling

NO_SCALES, ROW_SCALES, BLOCK_SCALES = 0, 1, 2


@triton.jit
def _largest_bits(values, AXIS: tl.constexpr):
    """Bits of the largest magnitude along an axis: bits order as the magnitudes, with NaN above infinity."""
    return tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=AXIS)


@triton.jit
def _floored(bits):
    # This too must let NaN through, so that a poisoned row stays visible.
    return tl.maximum(bits.to(tl.float32, bitcast=True), 1e-12, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _codes(scaled):
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def store_quantized(
    values,
    at,
    inside,
    block,
    row,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Store one row, given as bfloat16 [blocks, 128] with zeros outside, in the form that SCALES asks for."""
    if SCALES == 0:
        tl.store(out_ptr + at, values, mask=inside)
    else:
        y = values.to(tl.float32)
        bits = _largest_bits(y, 1)
        if SCALES == 1:
            amax = _floored(tl.max(bits, axis=0))
            scaled = y * tl.div_rn(448.0, amax)
            tl.store(scale_ptr + row * scale_row_stride, tl.div_rn(amax, 448.0))
        else:
            amax = _floored(bits)
            scaled = y * tl.div_rn(448.0, amax)[:, None]
            scale_at = row * scale_row_stride + block * scale_block_stride
            tl.store(scale_ptr + scale_at, tl.div_rn(amax, 448.0), mask=block * 128 < WIDTH)
        # 8 to a thread, as bfloat16 has them: 16 would be another layout, which crosses shared memory.
        tl.store(tl.max_contiguous(out_ptr + at, [1, 8]), _codes(scaled), mask=inside)


@triton.jit
def store_quantized_rows(
    values,
    row,
    valid,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
):
    """As `store_quantized` for several rows: values [rows, blocks, 128]; their places, int64, and which exist."""
    block = tl.arange(0, values.shape[1])
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = row[:, None, None] * WIDTH + column[None, :, :]
    inside = valid[:, None, None] & (column < WIDTH)[None, :, :]
    if SCALES == 0:
        tl.store(out_ptr + at, values, mask=inside)
    else:
        y = values.to(tl.float32)
        bits = _largest_bits(y, 2)
        if SCALES == 1:
            amax = _floored(tl.max(bits, axis=1))
            scaled = y * tl.div_rn(448.0, amax)[:, None, None]
            tl.store(scale_ptr + row * scale_row_stride, tl.div_rn(amax, 448.0), mask=valid)
        else:
            amax = _floored(bits)
            scaled = y * tl.div_rn(448.0, amax)[:, :, None]
            scale_at = row[:, None] * scale_row_stride + (block * scale_block_stride)[None, :]
            mask = valid[:, None] & (block * 128 < WIDTH)[None, :]
            tl.store(scale_ptr + scale_at, tl.div_rn(amax, 448.0), mask=mask)
        tl.store(tl.max_contiguous(out_ptr + at, [1, 1, 8]), _codes(scaled), mask=inside)


def allocate_scales(rows: int, width: int, scales: int, device: torch.device) -> Tensor:
    """Float32 scales: none, [rows], or [rows, ceil(width / 128)].

    Block scales are stored column-major with rows padded to a multiple of 4, the layout that DeepGEMM's TMA loads read.
    """
    if scales == BLOCK_SCALES:
        return torch.empty(triton.cdiv(width, 128), triton.cdiv(rows, 4) * 4, device=device).T[:rows]
    return torch.empty(rows if scales else 0, device=device)


@triton.jit(do_not_specialize=["rows", "scale_block_stride"])
def quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    rows,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    column = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = row[:, None, None] * WIDTH + column[None, :, :]
    x = tl.load(x_ptr + at, mask=valid[:, None, None] & (column < WIDTH)[None, :, :], other=0.0)
    store_quantized_rows(x, row, valid, out_ptr, scale_ptr, scale_row_stride, scale_block_stride, WIDTH, SCALES)


def quantize_activation(x: Tensor, scales: int, tiling: RowTiling | None = None) -> tuple[Tensor, Tensor]:
    """(E4M3 codes [rows, width], float32 scales) of an activation that no kernel before it could quantize.

    Args:
        x: contiguous bfloat16 [rows, width].
        scales: ROW_SCALES as `reference.quantize_rows_e4m3`, or BLOCK_SCALES as `reference.quantize_row_blocks_e4m3`,
            laid out as `allocate_scales` says. NO_SCALES gives x itself and no scales.
        tiling: how to cut the rows up; chosen by shape by default.

    Raises:
        ValueError: x is of another type or layout.
    """
    if x.ndim != 2 or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"x: expected contiguous bfloat16 [rows, width], got {x.dtype} {list(x.shape)}")
    rows, width = x.shape
    scale = allocate_scales(rows, width, scales, x.device)
    if scales == NO_SCALES:
        return x, scale
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    tiling = tiling or row_tiling(rows, width)
    if rows:
        quantize_kernel[(triton.cdiv(rows, tiling.rows),)](
            x,
            codes,
            scale,
            scale.stride(0),
            scale.stride(1) if scales == BLOCK_SCALES else 0,
            rows,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            ROWS=tiling.rows,
            SCALES=scales,
            num_warps=tiling.warps,
        )
    return codes, scale
