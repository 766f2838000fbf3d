"""Exact row-wise top-k with ties to the lower index: the definition that every faster version is held against."""

from __future__ import annotations

import torch
from torch import Tensor


def radix_topk(scores: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, largest first; equal entries in the order of their index.

    Args:
        scores: float32 [rows, columns]. NaN ranks above every number, as in `torch.topk`.
        k: one k for all rows, or int64 [rows]; any size, 0 and more than `columns` included.

    Returns:
        values float32 [rows, max k] and indices int64 [rows, max k]. Beyond a row's own k, or beyond `columns`,
        values are -inf and indices -1.
    """
    rows, columns = scores.shape
    wanted = torch.full((rows,), k, device=scores.device) if isinstance(k, int) else k.to(scores.device)
    if wanted.shape != (rows,) or bool((wanted < 0).any()):
        raise ValueError(f"k must be one non-negative integer or {rows} of them")
    width = int(wanted.max()) if rows else 0
    values = scores.new_full((rows, width), float("-inf"))
    indices = torch.full((rows, width), -1, dtype=torch.int64, device=scores.device)
    kept = min(width, columns)
    if kept:
        values[:, :kept], indices[:, :kept] = _sorted_topk(scores, kept)
        beyond = torch.arange(width, device=scores.device) >= wanted[:, None]
        values.masked_fill_(beyond, float("-inf"))
        indices.masked_fill_(beyond, -1)
    return values, indices


def _sorted_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # torch.topk breaks ties as it likes, and a stable sort of whole rows is slow. The k-th value is exact either way:
    # everything above it is in, and of its equals the first ones are, up to k.
    threshold = scores.topk(k, dim=1).values[:, -1:]
    above = (scores > threshold) | (scores.isnan() & ~threshold.isnan())
    equal = (scores == threshold) | (scores.isnan() & threshold.isnan())
    chosen = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    columns = chosen.nonzero()[:, 1].view(scores.shape[0], k)
    values = scores.gather(1, columns)
    order = values.sort(dim=1, descending=True, stable=True).indices
    return values.gather(1, order), columns.gather(1, order)
