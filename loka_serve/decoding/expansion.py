"""Ranked leaves to ranked items. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.catalog import Catalog


@dataclass(frozen=True)
class ScoredItem:
    """One recommended item; `score` is its SID's log-probability, `rank` starts at 0."""

    item_index: int
    score: float
    semantic_id: tuple[int, ...]
    rank: int


def expand(
    leaves: NDArray[np.int32],
    scores: NDArray[np.float32],
    catalog: Catalog,
    allowed_items: NDArray[np.bool_] | None,
    num_items: int,
    max_items_per_leaf: int | None = None,
) -> list[ScoredItem]:
    """The first `num_items` items of the ranked leaves.

    Items of one SID share its score and come by popularity (the catalog's order); at most `max_items_per_leaf` of them.

    Args:
        leaves: int32 [beams], best first; entries below 0 end the list.
        scores: float32 [beams].
        allowed_items: bool [items], or None when no item is masked.
    """
    offsets = catalog.trie.item_offsets
    items: list[ScoredItem] = []
    for leaf, score in zip(leaves.tolist(), scores.tolist(), strict=True):
        if leaf < 0 or len(items) >= num_items:
            break
        candidates = np.arange(offsets[leaf], offsets[leaf + 1])
        if allowed_items is not None:
            candidates = candidates[allowed_items[candidates]]
        room = num_items - len(items)
        for index in candidates[: room if max_items_per_leaf is None else min(room, max_items_per_leaf)].tolist():
            items.append(ScoredItem(index, score, catalog.semantic_id(index), len(items)))
    return items
