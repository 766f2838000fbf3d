"""The end of every kernel that produces activations: rounding to BF16, or to E4M3 with a scale a row or a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_SCALES, ROW_SCALES, BLOCK_SCALES = 0, 1, 2


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
        amax = tl.max(tl.abs(y), axis=1)
        if SCALES == 1:
            amax = tl.max(amax, axis=0)
        # These two must let NaN through, so that a poisoned row stays visible.
        amax = tl.maximum(amax, 1e-12, propagate_nan=tl.PropagateNan.ALL)
        factor = 448.0 / amax
        if SCALES == 2:
            scaled = y * factor[:, None]
            scale_at = row * scale_row_stride + block * scale_block_stride
            tl.store(scale_ptr + scale_at, amax / 448.0, mask=block * 128 < WIDTH)
        else:
            scaled = y * factor
            tl.store(scale_ptr + row * scale_row_stride, amax / 448.0)
        codes = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        tl.store(out_ptr + at, codes, mask=inside)


def allocate_scales(rows: int, width: int, scales: int, device: torch.device) -> Tensor:
    """Float32 scales: none, [rows], or [rows, ceil(width / 128)].

    Block scales are stored column-major with rows padded to a multiple of 4, the layout that DeepGEMM's TMA loads read.
    """
    if scales == BLOCK_SCALES:
        return torch.empty(triton.cdiv(width, 128), triton.cdiv(rows, 4) * 4, device=device).T[:rows]
    return torch.empty(rows if scales else 0, device=device)
