"""What the rotation computes: that of `loka_serve.models.layers`, in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.models.layers import rotate


def rotate_queries(query: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Queries of each request turned by its position, which is that of all its beams.

    Args:
        query: bfloat16 [batch, beams, heads, head_dim].
        positions: int32 [batch].
        theta: base of the frequencies.
    """
    return rotate(query, positions[:, None].expand(query.shape[:2]), theta)


def rotate_keys(keys: Tensor, theta: float) -> Tensor:
    """Keys of a context turned by the position of their item: slot 0 stays as it is, slot 1 + j stands at position j.

    Args:
        keys: bfloat16 [batch, slots, groups, head_dim].
    """
    positions = torch.arange(keys.shape[1] - 1, device=keys.device).expand(keys.shape[0], -1)
    return torch.cat([keys[:, :1], rotate(keys[:, 1:], positions, theta)], dim=1)
