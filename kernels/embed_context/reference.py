"""What the context's embedding computes, one operation after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3


def embed_context(
    history: Tensor,
    lengths: Tensor,
    tables: Sequence[Tensor],
    static: Tensor,
    recency: Tensor | None,
    segment: Tensor | None,
    short_term_length: int,
) -> Tensor:
    """Rows of each request: its static position, then one an item; the float32 sum of all embeddings, rounded once.

    An item's age is its distance from the newest of its request. Rows beyond a request's items are zero.

    Args:
        history: int32 [batch, items, levels], codes of each item, oldest first; what stands beyond a length is not
            looked at.
        lengths: int32 [batch], items of each request, at most as many as `recency` has rows.
        tables: one [codes, width] for each level, bfloat16 or float32 like all that follow.
        static: [batch, width], see `embed_static`.
        recency: [ages, width], one row an age, or None.
        segment: [2, width], for ages from `short_term_length` on and for those below it, or None.

    Returns:
        [batch * (1 + items), width] of static's type.
    """
    batch, items, _ = history.shape
    position = torch.arange(items, device=history.device)
    live = (position < lengths[:, None])[..., None]
    codes = torch.where(live, history, 0).long()
    embedded = torch.zeros(batch, items, static.shape[1], device=history.device)
    for level, table in enumerate(tables):
        embedded = embedded + table.float()[codes[..., level]]
    age = (lengths[:, None].long() - 1 - position).clamp(min=0)
    if recency is not None:
        age = age.clamp(max=len(recency) - 1)
        embedded = embedded + recency.float()[age]
    if segment is not None:
        embedded = embedded + segment.float()[(age < short_term_length).long()]
    rows = torch.cat([static.float()[:, None], torch.where(live, embedded, 0.0)], dim=1)
    return rows.flatten(0, 1).to(static.dtype)


def embed_context_quantize(
    history: Tensor,
    lengths: Tensor,
    tables: Sequence[Tensor],
    static: Tensor,
    recency: Tensor | None,
    segment: Tensor | None,
    short_term_length: int,
    block_scales: bool,
) -> tuple[Tensor, Tensor]:
    """(E4M3 codes of `embed_context`, scales): scales [rows], or [rows, ceil(width / 128)] by block."""
    rows = embed_context(history, lengths, tables, static, recency, segment, short_term_length)
    return (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(rows)


def embed_static(features: Tensor, tables: Sequence[Tensor], static: Tensor) -> Tensor:
    """The static position of each request: the learned vector and its features' embeddings, summed in float32.

    Args:
        features: int32 [batch, features], 0 where a feature is unknown.
        tables: one [values + 1, width] for each feature, bfloat16 or float32.
        static: [width], of the same type.

    Returns:
        [batch, width] of static's type, rounded once.
    """
    embedded = static.float().expand(features.shape[0], -1)
    for column, table in enumerate(tables):
        embedded = embedded + F.embedding(features[:, column], table).float()
    return embedded.to(static.dtype)
