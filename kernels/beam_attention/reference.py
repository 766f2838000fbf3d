"""What beam attention computes, in plain PyTorch and float32: over BF16 contexts, and over E4M3 with its rounding.

A request's context is one set of keys and values that all its beams share. Beams stand beside each other in a tensor as
wide as the batch's widest request; the first `beam_counts[b]` of them are live, and the output of the others is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quantize.reference import quantize_rows_e4m3, round_to_e4m3

SLOT_MULTIPLE = 128
"""Slots of an E4M3 context are padded to a multiple of this, which every block of slots divides."""
LEAST_FP8_WIDTH = 32
"""An 8-bit product reaches over at least this many numbers; a narrower head is padded with zeros."""
PROBABILITY_SHIFT = 8.0
"""Largest exponent of 2 of a probability when it is rounded to E4M3 (whose largest value is 448)."""


@dataclass(frozen=True)
class Fp8Context:
    """Keys and values of a batch in E4M3, laid out for products that contract over their last dimension.

    Attributes:
        keys: E4M3 [batch, groups, slots, width]; slots and width padded with zeros.
        values: E4M3 [batch, groups, width, slots]; each 16 slots stand in the order of `interleave`.
        key_scale, value_scale: float32 [batch, groups], one scale for the visible slots of a request and group.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor


def interleave(slots: Tensor) -> Tensor:
    """Reorder the last dimension in sixteens: place 4q + 2j + r takes element 8j + 2q + r (q < 4; j, r < 2).

    A thread of a matrix product holds result columns 2q, 2q + 1, 8 + 2q, 8 + 2q + 1, and feeds an 8-bit operand with
    columns 4q..4q + 3. With values in this order the one is the other, and probabilities stay where they are.
    """
    return slots.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)


def visible_slots(lengths: Tensor, slots: int) -> Tensor:
    """Bool [batch, slots]: the first lengths[b] of each request."""
    return torch.arange(slots, device=lengths.device) < lengths[:, None]


def quantize_context(keys: Tensor, values: Tensor, lengths: Tensor) -> Fp8Context:
    """E4M3 codes of a context; slots beyond a length count for nothing and become zeros.

    Args:
        keys, values: bfloat16 [batch, slots, groups, head_dim]; the same tensor where keys serve as values.
        lengths: int32 [batch], visible slots of each request.
    """
    batch, slots, groups, head_dim = keys.shape
    visible = visible_slots(lengths, slots)[:, None, :, None]
    width = max(head_dim, LEAST_FP8_WIDTH)

    def quantize(tensor: Tensor) -> tuple[Tensor, Tensor]:
        by_group = torch.where(visible, tensor.transpose(1, 2).float(), 0.0)
        codes, scale = quantize_rows_e4m3(by_group.flatten(2))
        padded = torch.zeros(batch, groups, -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE, width, device=keys.device)
        padded[:, :, :slots, :head_dim] = codes.unflatten(-1, (slots, head_dim)).float()
        return padded, scale

    key_codes, key_scale = quantize(keys)
    value_codes, value_scale = quantize(values)
    return Fp8Context(
        key_codes.to(torch.float8_e4m3fn),
        interleave(value_codes.transpose(2, 3)).to(torch.float8_e4m3fn),
        key_scale,
        value_scale,
    )


def beam_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, beam_counts: Tensor, scale: float | None = None
) -> Tensor:
    """Softmax attention of every live beam over its request's visible slots, in query's type and shape.

    Args:
        query: bfloat16 or float32 [batch, beams, heads, head_dim].
        keys, values: of the same type, [batch, slots, groups, head_dim]; heads h * (heads / groups).. read group h.
        lengths: int32 [batch], visible slots of each request.
        beam_counts: int32 [batch], live beams of each request.
        scale: of the scores; head_dim ** -0.5 by default.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    visible = visible_slots(lengths, keys.shape[1])[:, None, None, :]
    grouped = _by_group(query.float(), keys.shape[2])
    by_group = keys.float().transpose(1, 2)
    scores = (grouped @ by_group.transpose(2, 3) * scale).masked_fill(~visible, -math.inf)
    # Zeros stand for what is beyond the length, which may hold anything.
    shown = torch.where(visible.transpose(2, 3), values.float().transpose(1, 2), 0.0)
    return _finish(scores.softmax(-1) @ shown, query, lengths, beam_counts)


def beam_attention_fp8(
    query: Tensor, context: Fp8Context, lengths: Tensor, beam_counts: Tensor, scale: float | None = None
) -> Tensor:
    """As `beam_attention` over an E4M3 context, rounding what the kernel rounds.

    Queries are rounded by row (one head of one beam). Probabilities are rounded after a shift that takes the largest to
    between 2**7 and 2**8; their sum is taken before rounding.
    """
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    visible = visible_slots(lengths, context.keys.shape[2])[:, None, None, :]
    codes, query_scale = quantize_rows_e4m3(_by_group(query, context.keys.shape[1]))
    scores = codes.float() @ context.keys.float()[..., :head_dim].transpose(2, 3)
    exponent = scores * (query_scale * (context.key_scale * (scale * math.log2(math.e)))[..., None])[..., None]
    exponent = exponent.masked_fill(~visible, -math.inf)
    top = exponent.amax(-1, keepdim=True).ceil()
    probability = torch.exp2(exponent - (top - PROBABILITY_SHIFT))
    values = context.values.float()[:, :, :head_dim]
    products = interleave(round_to_e4m3(probability).float()) @ values.transpose(2, 3)
    attended = products / probability.sum(-1, keepdim=True) * context.value_scale[..., None, None]
    return _finish(attended, query, lengths, beam_counts)


def _by_group(query: Tensor, groups: int) -> Tensor:
    """[batch, beams, heads, head_dim] -> [batch, groups, beams * heads of a group, head_dim]."""
    return query.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)


def _finish(attended: Tensor, query: Tensor, lengths: Tensor, beam_counts: Tensor) -> Tensor:
    """Back to query's shape and type, dead beams zero."""
    batch, beams, heads, _ = query.shape
    groups = attended.shape[1]
    attended = attended.unflatten(2, (beams, heads // groups)).transpose(1, 2).flatten(2, 3)
    live = (torch.arange(beams, device=query.device) < beam_counts[:, None]) & (lengths > 0)[:, None]
    return torch.where(live[..., None, None], attended, 0.0).to(query.dtype)
