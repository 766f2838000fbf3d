"""Ranking metrics of the groceries example: next item over all positions, and the last basket as a set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOP = 10
Items = Sequence[int] | NDArray[np.integer[Any]]


def next_item_metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    """{"hr@10", "ndcg@10"} of one relevant item a list; `ranks` counts from 0, a miss is any rank >= 10."""
    hits = ranks < TOP
    gains = np.where(hits, 1.0 / np.log2(np.minimum(ranks, TOP) + 2.0), 0.0)
    return {"hr@10": float(hits.mean()), "ndcg@10": float(gains.mean())}


def basket_metrics(lists: Iterable[Items], baskets: Iterable[Items]) -> dict[str, float]:
    """{"recall@10", "ndcg@10"}: means over households of ten recommended items against the basket as a set."""
    discounts = 1.0 / np.log2(np.arange(TOP) + 2.0)
    recalls, gains = [], []
    for recommended, basket in zip(lists, baskets, strict=True):
        relevant = set(int(item) for item in basket)
        hits = np.array([int(item) in relevant for item in list(recommended)[:TOP]], dtype=float)
        recalls.append(hits.sum() / len(relevant))
        gains.append((hits * discounts[: len(hits)]).sum() / discounts[: len(relevant)].sum())
    return {"recall@10": float(np.mean(recalls)), "ndcg@10": float(np.mean(gains))}


def ranks_of(scores: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rank from 0 of each row's target in scores [rows, items]; ties go to the lower item number."""
    own = scores[np.arange(len(targets)), targets][:, None]
    ties_before = (scores == own) & (np.arange(scores.shape[1]) < targets[:, None])
    return (scores > own).sum(axis=1) + ties_before.sum(axis=1)
