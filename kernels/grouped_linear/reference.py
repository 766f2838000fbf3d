"""Reference grouped GEMMs of the recipes: each group's rows times that group's weight, with FP32 accumulation.

Rows come sorted by group; group g owns rows ``group_offsets[g]`` to ``group_offsets[g + 1]`` (int64 ``[groups + 1]``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..linear.reference import linear_bf16, linear_block_scaled, linear_row_scaled, linear_row_scaled_int8


def grouped_linear_bf16(inputs: Tensor, weight: Tensor, group_offsets: Tensor) -> Tensor:
    """``linear_bf16`` by group: inputs ``[M, K]``, weight ``[groups, N, K]`` to float32 ``[M, N]``."""
    return _by_group(group_offsets, weight, lambda rows, group: linear_bf16(inputs[rows], weight[group]))


def grouped_linear_row_scaled(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, group_offsets: Tensor
) -> Tensor:
    """``linear_row_scaled`` by group; scale ``[M]`` or scalar, weight_scale ``[groups, N]``."""
    return _by_group(
        group_offsets,
        weight,
        lambda rows, group: linear_row_scaled(
            codes[rows], scale[rows] if scale.ndim else scale, weight[group], weight_scale[group]
        ),
    )


def grouped_linear_row_scaled_int8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, group_offsets: Tensor
) -> Tensor:
    """``linear_row_scaled_int8`` by group; scale ``[M]``, weight_scale ``[groups, N]``."""
    return _by_group(
        group_offsets,
        weight,
        lambda rows, group: linear_row_scaled_int8(codes[rows], scale[rows], weight[group], weight_scale[group]),
    )


def grouped_linear_block_scaled(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, group_offsets: Tensor
) -> Tensor:
    """``linear_block_scaled`` by group; scale ``[M, tiles]``, weight_scale ``[groups, tiles, tiles]``."""
    return _by_group(
        group_offsets,
        weight,
        lambda rows, group: linear_block_scaled(codes[rows], scale[rows], weight[group], weight_scale[group]),
    )


def _by_group(group_offsets: Tensor, weight: Tensor, product: Callable[[slice, int], Tensor]) -> Tensor:
    bounds = group_offsets.tolist()
    output = torch.empty(bounds[-1], weight.shape[1], dtype=torch.float32, device=weight.device)
    for group, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if end > start:
            output[start:end] = product(slice(start, end), group)
    return output
