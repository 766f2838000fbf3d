"""Some rows a program: add the residual, normalise, quantize, so that each value crosses device memory once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.tilings import RowTiling, row_tiling
from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, allocate_scales, store_quantized_rows


@triton.jit(do_not_specialize=["rows", "scale_block_stride"])
def residual_norm_kernel(
    x_ptr,
    residual_ptr,
    gain_ptr,
    total_ptr,
    normed_ptr,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    eps,
    rows,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    ROWS: tl.constexpr,  # of a program
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_NORM: tl.constexpr,  # over 256 columns each, BLOCKS even; gain_ptr is not read
    BOTH: tl.constexpr,  # store the norm itself besides what SCALES asks for
    SCALES: tl.constexpr,  # 0: bfloat16 output, 1: a scale a row, 2: a scale a 1 x 128 block
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    column = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = row[:, None, None] * WIDTH + column[None, :, :]
    inside = valid[:, None, None] & (column < WIDTH)[None, :, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(tl.bfloat16)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    if BLOCK_NORM:
        squares = tl.sum(tl.reshape(x * x, (ROWS, BLOCKS // 2, 2, 128)), axis=3)
        block = tl.arange(0, BLOCKS // 2)
        width = tl.minimum(tl.maximum(WIDTH - block * 256, 1), 256)  # 1 where there is no column
        mean_square = tl.sum(squares, axis=2) / width[None, :]
        pairs = tl.reshape(x, (ROWS, BLOCKS // 2, 2, 128)) * tl.math.rsqrt(mean_square + eps)[:, :, None, None]
        normed = tl.reshape(pairs, (ROWS, BLOCKS, 128)).to(tl.bfloat16)
    else:
        # Once a row, from the L1 cache: in another shape it would have another layout, and cross shared memory.
        gain = tl.load(gain_ptr + tl.zeros_like(at) + column[None, :, :], mask=inside, other=0.0).to(tl.float32)
        mean_square = tl.sum(tl.sum(x * x, axis=2), axis=1) / WIDTH
        normed = (x * tl.math.rsqrt(mean_square + eps)[:, None, None] * gain).to(tl.bfloat16)
    if BOTH:
        tl.store(normed_ptr + at, normed, mask=inside)
    store_quantized_rows(normed, row, valid, out_ptr, scale_ptr, scale_row_stride, scale_block_stride, WIDTH, SCALES)


def residual_norm(
    x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float, tiling: RowTiling | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.residual_norm`; x and residual contiguous bfloat16 [rows, width]."""
    total, _, out, _ = _launch(x, residual, gain, eps, NO_SCALES, False, tiling)
    return total, out


def residual_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    eps: float,
    block_scales: bool,
    tiling: RowTiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.residual_norm_quantize`; block scales are column-major, see `allocate_scales`."""
    total, _, codes, scale = _launch(x, residual, gain, eps, _scales(block_scales), False, tiling)
    return total, codes, scale


def residual_norm_both(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    eps: float,
    block_scales: bool,
    tiling: RowTiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.residual_norm_both`: the norm before a sparse MoE, whose router reads it in bfloat16."""
    return _launch(x, residual, gain, eps, _scales(block_scales), True, tiling)


def _scales(block_scales: bool) -> int:
    return BLOCK_SCALES if block_scales else ROW_SCALES


def _launch(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    eps: float,
    scales: int,
    both: bool,
    tiling: RowTiling | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = x.shape
    if x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"x: expected contiguous bfloat16 [rows, width], got {x.dtype} with strides {x.stride()}")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"residual: expected contiguous bfloat16 {list(x.shape)}")
    if gain is not None and (gain.shape != (width,) or not gain.is_contiguous()):
        raise ValueError(f"gain: expected contiguous [{width}], got {list(gain.shape)}")
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn if scales else torch.bfloat16)
    normed = torch.empty_like(x) if both else out
    total = x if residual is None else torch.empty_like(x)
    scale = allocate_scales(rows, width, scales, x.device)
    tiling = tiling or row_tiling(rows, width)
    blocks = triton.next_power_of_2(triton.cdiv(width, 128))
    if rows:
        residual_norm_kernel[(triton.cdiv(rows, tiling.rows),)](
            x,
            residual,
            x if gain is None else gain,
            total,
            normed,
            out,
            scale,
            scale.stride(0),
            scale.stride(1) if scales == BLOCK_SCALES else 0,
            eps,
            rows,
            WIDTH=width,
            BLOCKS=blocks if gain is not None else max(blocks, 2),
            ROWS=tiling.rows,
            HAS_RESIDUAL=residual is not None,
            BLOCK_NORM=gain is None,
            BOTH=both,
            SCALES=scales,
            num_warps=tiling.warps,
        )
    return total, normed, out, scale
