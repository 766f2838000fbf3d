"""What the rotation computes, in float32 and rounded once (arXiv 2104.09864, halves layout)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [..., heads, head_dim] turned by its position, [...]; element i goes with element i + head_dim / 2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


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
