"""Self-attention through ancestors against what it replaces: copying the caches in the parents' order, then SDPA."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..benchmarking import KernelRow, copies_beyond_l2, dequantized, make_row, relative_error, scale_bytes, time_us
from ..quantize.triton import ROW_SCALES, quantize_activation
from . import reference
from .triton import extend_ancestors, self_attention, self_attention_quantize

HEADS, HEAD_DIM, LEVELS = 11, 128, 3  # onerec-v2-4b-a0.5b
SHAPES = ((1, 1), (8, 1), (1, 64), (1, 512), (8, 128), (8, 512), (32, 512))


def rows() -> Iterator[KernelRow]:
    """Each level but the first, at each (batch, beams); the last level in E4M3 too, and its ancestors."""
    for batch, beams in SHAPES:
        for level in range(1, LEVELS):
            yield _row(batch, beams, level)
        yield _quantized_row(batch, beams)
        yield _ancestors_row(batch, beams)


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
    error = relative_error(found, expected)
    traffic = _values_moved(inputs[0], level) * 2
    flops = 4.0 * batch * beams * (level + 1) * HEADS * HEAD_DIM
    baseline = ("reorder, concatenate, SDPA", time_us(_reordering, inputs))
    us = time_us(ours, inputs)
    return make_row("self_attention", f"B{batch} W{beams} level {level}", us, flops, traffic, baseline, error)


def _values_moved(inputs: tuple[Tensor, ...], level: int, out: int = 1) -> int:
    """Values read and written: q k v and what is stored of them, distinct ancestors' keys and values, the output."""
    qkv, keys, _, ancestors = inputs[:4]
    batch, beams = qkv.shape[:2]
    past = sum(len(place.unique()) for request in ancestors for place in request.unbind(1))
    stored = 2 if level < keys.shape[0] else 0
    return HEADS * HEAD_DIM * (batch * beams * (3 + stored + out) + 2 * past)


def _quantized_row(batch: int, beams: int) -> KernelRow:
    """Attention that leaves E4M3 codes and row scales, against attention and then quantization."""
    level, count, width = LEVELS - 1, batch * beams, HEADS * HEAD_DIM
    attended = [_inputs(batch, beams, level, seed) for seed in range(copies_beyond_l2(6 * count * width))]
    inputs = [
        (*one[:5], one[5], torch.empty(count, width, dtype=torch.float8_e4m3fn, device="cuda")) for one in attended
    ]

    def ours(
        qkv: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, counts: Tensor, _: Tensor, codes: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self_attention_quantize(qkv, keys, values, ancestors, counts, level, False, None, codes)

    def in_two_passes(
        qkv: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, counts: Tensor, out: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor]:
        self_attention(qkv, keys, values, ancestors, counts, level, None, out)
        return quantize_activation(out.view(count, width), ROW_SCALES)

    error = relative_error(dequantized(*ours(*inputs[0])), dequantized(*in_two_passes(*inputs[0])))
    traffic = 2 * _values_moved(attended[0], level, out=0) + count * width + scale_bytes(count, width, False)
    us, baseline = time_us(ours, inputs), ("self_attention, then quantize", time_us(in_two_passes, inputs))
    flops = 4.0 * count * (level + 1) * width
    return make_row("self_attention_quantize", f"B{batch} W{beams} level {level}", us, flops, traffic, baseline, error)


def _ancestors_row(batch: int, beams: int) -> KernelRow:
    previous = torch.zeros(batch, beams, 1, dtype=torch.int32, device="cuda")
    inputs = [(previous, torch.randint(0, beams, (batch, beams), device="cuda").int()) for _ in range(8)]
    error = 0.0 if torch.equal(extend_ancestors(*inputs[0]), reference.extend_ancestors(*inputs[0])) else 1.0
    us, baseline = time_us(extend_ancestors, inputs), ("torch", time_us(reference.extend_ancestors, inputs))
    return make_row("extend_ancestors", f"B{batch} W{beams} level 2", us, 0, 16 * batch * beams, baseline, error)


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
