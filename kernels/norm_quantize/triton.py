"""One program a row: add the residual, normalise, quantize, so that each value crosses device memory once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import allocate_scales, store_quantized


@triton.jit
def residual_norm_kernel(
    x_ptr,
    residual_ptr,
    gain_ptr,
    total_ptr,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    HAS_RESIDUAL: tl.constexpr,
    SCALES: tl.constexpr,  # 0: bfloat16 output, 1: a scale a row, 2: a scale a 1 x 128 block
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    at = row * WIDTH + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(tl.bfloat16)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(tl.sum(x * x, axis=1), axis=0) / WIDTH
    normed = (x * tl.math.rsqrt(mean_square + eps) * gain).to(tl.bfloat16)
    store_quantized(
        normed, at, inside, block, row, out_ptr, scale_ptr, scale_row_stride, scale_block_stride, WIDTH, SCALES
    )


def residual_norm(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.residual_norm`; x and residual contiguous bfloat16 [rows, width]."""
    total, out, _ = _launch(x, residual, gain, eps, scales=0)
    return total, out


def residual_norm_quantize(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, block_scales: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.residual_norm_quantize`; block scales are column-major, see `allocate_scales`."""
    return _launch(x, residual, gain, eps, scales=2 if block_scales else 1)


def _launch(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, scales: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = x.shape
    if x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"x: expected contiguous bfloat16 [rows, width], got {x.dtype} with strides {x.stride()}")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"residual: expected contiguous bfloat16 {list(x.shape)}")
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn if scales else torch.bfloat16)
    total = x if residual is None else torch.empty_like(x)
    scale = allocate_scales(rows, width, scales, x.device)
    if rows:
        residual_norm_kernel[(rows,)](
            x,
            residual,
            gain,
            total,
            out,
            scale,
            scale.stride(0),
            scale.stride(1) if scales == 2 else 0,
            eps,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            HAS_RESIDUAL=residual is not None,
            SCALES=scales,
            num_warps=4 if width <= 2048 else 8,
        )
    return total, out, scale
