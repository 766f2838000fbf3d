"""Self-attention through ancestors against what it replaces: copying the caches in the parents' order, then SDPA."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..benchmarking import KernelRow, copies_beyond_l2, make_row, time_us
from . import reference
from .triton import self_attention

HEADS, HEAD_DIM, LEVELS = 11, 128, 3  # onerec-v2-4b-a0.5b
SHAPES = ((1, 512), (8, 128), (8, 512), (32, 512))


def rows() -> Iterator[KernelRow]:
    """Each level but the first, at each (batch, beams)."""
    for batch, beams in SHAPES:
        for level in range(1, LEVELS):
            yield _row(batch, beams, level)


def _row(batch: int, beams: int, level: int) -> KernelRow:
    row_bytes = 2 * HEADS * HEAD_DIM
    inputs = [_inputs(batch, beams, level, seed) for seed in range(copies_beyond_l2(3 * batch * beams * row_bytes))]

    def ours(
        qkv: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, counts: Tensor, out: Tensor, _: Tensor
    ) -> Tensor:
        return self_attention(qkv, keys, values, ancestors, counts, level, None, out)

    found = ours(*inputs[0])
    qkv, keys, values, ancestors, counts = inputs[0][:5]
    expected = reference.self_attention(qkv, keys, values, ancestors, counts, level)
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    past = sum(len(place.unique()) for request in ancestors for place in request.unbind(1))
    stored = 2 if level < keys.shape[0] else 0
    traffic = row_bytes * (batch * beams * (4 + stored) + 2 * past)
    flops = 4.0 * batch * beams * (level + 1) * HEADS * HEAD_DIM
    baseline = ("reorder, concatenate, SDPA", time_us(_reordering, inputs))
    us = time_us(ours, inputs)
    return make_row("self_attention", f"B{batch} W{beams} level {level}", us, flops, traffic, baseline, error)


def _inputs(batch: int, beams: int, level: int, seed: int) -> tuple[Tensor, ...]:
    """(qkv, key cache, value cache, ancestors, beam counts, out, the baseline's cache [batch, beams, level, 2 ...])."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator).bfloat16()

    keys, values = normal(2, LEVELS - 1, batch, beams, HEADS, HEAD_DIM).unbind(0)
    ancestors = torch.zeros(batch, beams, level, dtype=torch.int32, device="cuda")
    if level > 1:
        # Beams come best first, and the best parents have the most children.
        skewed = torch.rand(batch, beams, level - 1, device="cuda", generator=generator) ** 2 * beams
        ancestors[:, :, 1:] = skewed.sort(1).values.int()
    counts = torch.full((batch,), beams, dtype=torch.int32, device="cuda")
    out = torch.zeros(batch, beams, HEADS, HEAD_DIM, device="cuda").bfloat16()
    qkv = normal(batch, beams, 3, HEADS, HEAD_DIM)
    return qkv, keys, values, ancestors, counts, out, normal(batch, beams, level, 2, HEADS, HEAD_DIM)


def _reordering(
    qkv: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, counts: Tensor, out: Tensor, cache: Tensor
) -> Tensor:
    parents = ancestors[:, :, -1].long()
    past = cache[torch.arange(len(parents), device=parents.device)[:, None], parents]
    whole = torch.cat([past, qkv[:, :, None, 1:]], dim=2).flatten(0, 1)
    query = qkv[:, :, 0].flatten(0, 1)[:, :, None]
    return F.scaled_dot_product_attention(query, whole[:, :, 0].transpose(1, 2), whole[:, :, 1].transpose(1, 2))
