"""What self-attention of beams computes, in plain PyTorch and float32.

Each level's keys and values stay where the beams of that level stood. A beam finds its past through its ancestors, the
places of the beams that it continues, so nothing is copied when the search reorders its beams.
"""

from __future__ import annotations

import torch
from torch import Tensor


def extend_ancestors(previous: Tensor | None, parents: Tensor) -> Tensor:
    """Ancestors of the next level's beams: those of their parents, then the parents.

    Args:
        previous: int32 [batch, beams before, level]; None before level 1, whose parents are the only beam of level 0.
        parents: int32 [batch, beams], the beam that each beam continues.

    Returns:
        int32 [batch, beams, level + 1].
    """
    if previous is None:
        return parents[:, :, None]
    rows = torch.arange(parents.shape[0], device=parents.device)[:, None]
    return torch.cat([previous[rows, parents.long()], parents[:, :, None]], dim=2)


def self_attention(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    ancestors: Tensor | None,
    beam_counts: Tensor,
    level: int,
    scale: float | None = None,
) -> Tensor:
    """Attention of live beams over their `level` earlier positions and their own; others' output is zero.

    Keys and values of the level are stored in the caches, unless the caches end before it: the last level's are never
    read again.

    Args:
        qkv: bfloat16 or float32 [batch, beams, 3, heads, head_dim].
        key_cache, value_cache: of the same type, [levels, batch, most beams, heads, head_dim].
        ancestors: int32 [batch, beams, at least level]; None at level 0.
        beam_counts: int32 [batch], live beams of each request.
        scale: of the scores; head_dim ** -0.5 by default.

    Returns:
        [batch, beams, heads, head_dim] of qkv's type.
    """
    batch, beams, _, _, head_dim = qkv.shape
    query, key, value = qkv.float().unbind(2)
    live = (torch.arange(beams, device=qkv.device) < beam_counts[:, None])[..., None, None]
    if level < key_cache.shape[0]:
        for cache, new in ((key_cache[level, :, :beams], key), (value_cache[level, :, :beams], value)):
            cache.copy_(torch.where(live, new.to(cache.dtype), cache))
    rows = torch.arange(batch, device=qkv.device)[:, None]
    keys, values = [], []
    for past in range(level):
        assert ancestors is not None
        # Dead beams may point anywhere.
        places = torch.where(live[..., 0, 0], ancestors[:, :, past], 0).long()
        keys.append(key_cache[past][rows, places].float())
        values.append(value_cache[past][rows, places].float())
    scores = (query[:, :, None] * torch.stack([*keys, key], 2)).sum(-1) * (head_dim**-0.5 if scale is None else scale)
    attended = (scores.softmax(2)[..., None] * torch.stack([*values, value], 2)).sum(2)
    return torch.where(live, attended, 0.0).to(qkv.dtype)
