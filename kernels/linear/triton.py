"""A dense GEMM, x times the rows of a weight, in BF16 or FP8, in tiles small enough that few rows fill the GPU.

A few rows cost what reading the weight costs, so the weight is cut into so many narrow tiles that every multiprocessor
reads some of it. K is never split: each output is one program's sum in one order, whatever the other rows are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES
from .tilings import Tiling

GROUP_M = 8  # blocks of rows that pass over the weight together, so that a weight tile is read once into L2


@triton.jit
def _accumulate(total, x, w, x_scale, w_scale, SCALES: tl.constexpr):
    if SCALES == 2:
        return total + tl.dot(x, w.T) * (x_scale * w_scale)
    elif SCALES == 1:
        # Hopper's tensor cores keep too few bits of a long FP8 sum; this adds every 128 products in float32.
        return tl.dot(x, w.T, total, max_num_imprecise_acc=128)
    else:
        return tl.dot(x, w.T, total)


@triton.jit(do_not_specialize=["x_scale_row_stride", "x_scale_block_stride", "weight_scale_stride", "rows"])
def linear_kernel(
    x_ptr,
    x_scale_ptr,
    x_scale_row_stride,
    x_scale_block_stride,
    weight_ptr,
    weight_scale_ptr,
    weight_scale_stride,
    out_ptr,
    rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides 128 with block scales
    BLOCK_K: tl.constexpr,  # 128 with block scales
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALES: tl.constexpr,  # 0: bfloat16, 1: a scale a row, 2: a scale a block
):
    program = tl.program_id(0)
    tiles = tl.cdiv(N, BLOCK_N)
    first_block = program // (GROUP_M * tiles) * GROUP_M
    group = tl.minimum(tl.cdiv(rows, BLOCK_M) - first_block, GROUP_M)
    within = program % (GROUP_M * tiles)
    row = (first_block + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // group * BLOCK_N
    channel = column + tl.arange(0, BLOCK_N)

    # Beyond the edges the last row is computed again and not stored: loads without a mask.
    source = tl.minimum(row, rows - 1).to(tl.int64)
    weight_row = tl.minimum(channel, N - 1).to(tl.int64)
    k_lane = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + source[:, None] * K + k_lane[None, :]
    w_ptrs = weight_ptr + weight_row[:, None] * K + k_lane[None, :]
    if SCALES > 0:
        x_scale_ptrs = x_scale_ptr + source * x_scale_row_stride
    if SCALES == 2:
        tile_scale_ptr = weight_scale_ptr + column // 128 * weight_scale_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        if SCALES == 2:  # asked for before the product starts, so that they arrive while it runs
            x_scale = tl.load(x_scale_ptrs + k // 128 * x_scale_block_stride)[:, None]
            w_scale = tl.load(tile_scale_ptr + k // 128)
        else:
            x_scale, w_scale = None, None
        if EVEN_K:
            x = tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k)
        else:
            inside_k = (k_lane < K - k)[None, :]
            x = tl.load(x_ptrs + k, mask=inside_k, other=0.0)
            w = tl.load(w_ptrs + k, mask=inside_k, other=0.0)
        total = _accumulate(total, x, w, x_scale, w_scale, SCALES)
    if SCALES == 1:
        total *= tl.load(x_scale_ptrs)[:, None] * tl.load(weight_scale_ptr + weight_row)[None, :]
    inside = (row < rows)[:, None] & (channel < N)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * N + channel[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


def triton_linear(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    tiling: Tiling,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x times the rows of weight, rounded once: [M, N] of `out_dtype` (bfloat16 or float32).

    Args:
        x: contiguous [M, K], bfloat16, or E4M3 with float32 `scale` [M] or [M, ceil(K / 128)] of any strides.
        weight: contiguous [N, K] of the type of x, with float32 `weight_scale` [N], or [ceil(N / 128), ceil(K / 128)]
            whose rows are contiguous.
    """
    rows, inner = x.shape
    channels = weight.shape[0]
    out = x.new_empty(rows, channels, dtype=out_dtype)
    if not out.numel():
        return out
    scales = NO_SCALES if scale is None else ROW_SCALES if scale.ndim == 1 else BLOCK_SCALES
    if scales == BLOCK_SCALES and 128 % tiling.block_n:
        raise ValueError(f"tiling: with block scales block_n must divide 128, got {tiling.block_n}")
    block_k = 128 if scales == BLOCK_SCALES else tiling.k_bytes // x.element_size()
    by_block = scale is not None and weight_scale is not None and scales == BLOCK_SCALES
    linear_kernel[(triton.cdiv(rows, tiling.block_m) * triton.cdiv(channels, tiling.block_n),)](
        x,
        scale,
        scale.stride(0) if scale is not None else 0,
        scale.stride(1) if scale is not None and by_block else 0,
        weight,
        weight_scale,
        weight_scale.stride(0) if weight_scale is not None and by_block else 0,
        out,
        rows,
        channels,
        inner,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=block_k,
        GROUP_M=GROUP_M,
        EVEN_K=inner % block_k == 0,
        SCALES=scales,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out
