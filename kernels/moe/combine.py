"""The end of the block: each token's weighted rows added up, and the next block's norm and quantization of the sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import BLOCK_SCALES, NO_SCALES, allocate_scales, store_quantized


@triton.jit
def combine_kernel(
    output_ptr,
    position_ptr,
    slot_weight_ptr,
    shared_ptr,
    residual_ptr,
    total_ptr,
    gain_ptr,
    normed_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    SLOTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    at = token * WIDTH + column
    total = tl.zeros([BLOCKS, 128], tl.float32)
    for slot in tl.static_range(SLOTS):
        position = tl.load(position_ptr + token * SLOTS + slot).to(tl.int64)
        weight = tl.load(slot_weight_ptr + token * SLOTS + slot)
        total += weight * tl.load(output_ptr + position * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(tl.bfloat16)
    tl.store(total_ptr + at, rounded, mask=inside)
    if NORM:
        x = rounded.to(tl.float32)
        gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
        mean_square = tl.sum(tl.sum(x * x, axis=1), axis=0) / WIDTH
        normed = (x * tl.math.rsqrt(mean_square + eps) * gain).to(tl.bfloat16)
        store_quantized(
            normed, at, inside, block, token, normed_ptr, scale_ptr, scale_row_stride, scale_block_stride, WIDTH, SCALES
        )


def combine(
    outputs: Tensor, positions: Tensor, weights: Tensor, shared: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As `reference.combine`; all contiguous."""
    return _launch(outputs, positions, weights, shared, residual, None, 0.0, NO_SCALES)[0]


def combine_norm_quantize(
    outputs: Tensor,
    positions: Tensor,
    weights: Tensor,
    gain: Tensor,
    eps: float,
    scales: int,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`combine`, then the RMSNorm of the sum in the form that the next linear takes, in one pass.

    Args:
        gain: [d_model].
        scales: NO_SCALES, ROW_SCALES or BLOCK_SCALES of `kernels.quantize.triton`.

    Returns:
        The bfloat16 sum, and as `norm_quantize.residual_norm_quantize` its norm with its scales (empty for NO_SCALES).
    """
    return _launch(outputs, positions, weights, shared, residual, gain, eps, scales)


def _launch(
    outputs: Tensor,
    positions: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None,
    gain: Tensor | None,
    eps: float,
    scales: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, slots = positions.shape
    width = outputs.shape[1]
    for name, tensor, rows in (
        ("outputs", outputs, len(outputs)),
        ("shared", shared, tokens),
        ("residual", residual, tokens),
    ):
        if tensor is not None and (
            tensor.dtype != torch.bfloat16 or not tensor.is_contiguous() or tensor.shape != (rows, width)
        ):
            raise ValueError(f"{name}: expected contiguous bfloat16 [{rows}, {width}]")
    total = outputs.new_empty(tokens, width)
    normed = (
        torch.empty_like(total, dtype=torch.float8_e4m3fn if scales else torch.bfloat16) if gain is not None else total
    )
    scale = allocate_scales(tokens, width, scales, outputs.device)
    if tokens:
        combine_kernel[(tokens,)](
            outputs,
            positions,
            weights,
            shared,
            residual,
            total,
            gain,
            normed,
            scale,
            scale.stride(0),
            scale.stride(1) if scales == BLOCK_SCALES else 0,
            eps,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            SLOTS=slots,
            HAS_SHARED=shared is not None,
            HAS_RESIDUAL=residual is not None,
            NORM=gain is not None,
            SCALES=scales,
            num_warps=4 if width <= 2048 else 8,
        )
    return total, normed, scale
