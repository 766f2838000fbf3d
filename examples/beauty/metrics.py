"""Leave-one-out ranking metrics: one relevant item a user, ranked among all items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOPS = (5, 10)
MISSED = 1 << 30


def ranking_metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    """{"recall@5", "ndcg@5", "recall@10", "ndcg@10"} of ranks from 0, one a user; a miss is any rank >= 10."""
    metrics: dict[str, float] = {}
    for top in TOPS:
        hits = ranks < top
        gains = np.where(hits, 1.0 / np.log2(np.minimum(ranks, top) + 2.0), 0.0)
        metrics |= {f"recall@{top}": float(hits.mean()), f"ndcg@{top}": float(gains.mean())}
    return metrics


def ranks_in(items: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rank from 0 of each row's target in items [rows, places]; MISSED where it is not there."""
    found = items == targets[:, None]
    return np.where(found.any(axis=1), found.argmax(axis=1), MISSED).astype(np.int64)


def without_history(items: NDArray[np.int64], histories: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ranked items [rows, places] without those of histories [rows, events]: they move to the end as -1.

    Negative entries are padding on both sides.
    """
    taken = (items[:, :, None] == histories[:, None]).any(axis=2)
    order = np.argsort(taken, axis=1, kind="stable")
    return np.take_along_axis(np.where(taken, -1, items), order, axis=1)
