"""Reference GEMMs of the recipes: what every linear kernel computes, with FP32 accumulation.

A product of two E4M3 (or two bfloat16) numbers is exact in float32, so a float32 matrix product of the codes is the
definition up to the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantize.reference import BLOCK


def linear_bf16(inputs: Tensor, weight: Tensor) -> Tensor:
    """Inputs and weight rounded to bfloat16, float32 accumulation.

    Args:
        inputs: float ``[M, K]``.
        weight: float ``[N, K]``.

    Returns:
        float32 ``[M, N]``.
    """
    return inputs.bfloat16().float() @ weight.bfloat16().float().T


def linear_row_scaled(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Product of row-scaled codes: fp8_row, and fp8_tensor with a scalar activation scale.

    Args:
        codes: E4M3 ``[M, K]``.
        scale: float32 ``[M]``, or a scalar.
        weight: E4M3 ``[N, K]``.
        weight_scale: float32 ``[N]``.

    Returns:
        float32 ``[M, N]``.
    """
    return (codes.float() @ weight.float().T) * scale.unsqueeze(-1) * weight_scale


def linear_row_scaled_int8(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """As ``linear_row_scaled`` for int8 codes, summed exactly (as an int32 accumulator does)."""
    # float64 holds every sum exactly: 127 * 127 * K stays far below 2**53.
    return (codes.double() @ weight.double().T).float() * scale.unsqueeze(-1) * weight_scale


def linear_block_scaled(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Product of fp8_block codes: each 128-wide slice of K is summed in float32, scaled, and added.

    Args:
        codes: E4M3 ``[M, K]``.
        scale: float32 ``[M, ceil(K / 128)]``.
        weight: E4M3 ``[N, K]``.
        weight_scale: float32 ``[ceil(N / 128), ceil(K / 128)]``.

    Returns:
        float32 ``[M, N]``.
    """
    output = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.float32, device=codes.device)
    channel_scale = weight_scale.repeat_interleave(BLOCK, dim=0)[: weight.shape[0]]
    for block, start in enumerate(range(0, codes.shape[1], BLOCK)):
        part = codes[:, start : start + BLOCK].float() @ weight[:, start : start + BLOCK].float().T
        output += part * scale[:, block, None] * channel_scale[:, block]
    return output


def linear(x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """The product in whichever recipe the scales say: float32 ``[M, N]``; see the functions above."""
    if scale is None or weight_scale is None:
        return linear_bf16(x, weight)
    product = linear_block_scaled if scale.ndim == 2 else linear_row_scaled
    return product(x, scale, weight, weight_scale)
