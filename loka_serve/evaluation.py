"""Ranking metrics shared by the build's gate and the examples.

Every function averages over users. A user's recommendations are item identifiers, best first; a repeated item counts
once, at its first place. Relevant items have binary relevance. Users without a relevant item are left out, and with no
user left the metric is NaN: there is nothing to measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def hit_rate_at_k(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> float:
    """Share of users with at least one relevant item among their first k recommendations."""
    return _mean_over_users(recommended, relevant, k, lambda top, wanted: float(any(item in wanted for item in top)))


def recall_at_k(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> float:
    """Mean share of a user's relevant items that are among the first k recommendations."""
    return _mean_over_users(
        recommended, relevant, k, lambda top, wanted: sum(item in wanted for item in top) / len(wanted)
    )


def ndcg_at_k(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> float:
    """Mean normalised discounted cumulative gain: gain 1 / log2(rank + 1), over that of the best possible first k."""

    def ndcg(top: list[Item], wanted: set[Item]) -> float:
        gain = sum(1.0 / math.log2(rank + 1) for rank, item in enumerate(top, start=1) if item in wanted)
        ideal = sum(1.0 / math.log2(rank + 1) for rank in range(1, min(k, len(wanted)) + 1))
        return gain / ideal

    return _mean_over_users(recommended, relevant, k, ndcg)


def top_k_overlap(first: Sequence[Sequence[Item]], second: Sequence[Sequence[Item]], k: int) -> float:
    """Mean share of the first k items that two rankings have in common, whatever their order.

    Where both rankings are shorter than k, the longer one's length takes the place of k; two empty rankings agree.
    """
    overlaps = []
    for ours, theirs in _pairs(first, second, k):
        top, other = set(_first_k(ours, k)), set(_first_k(theirs, k))
        longest = max(len(top), len(other))
        overlaps.append(len(top & other) / longest if longest else 1.0)
    return sum(overlaps) / len(overlaps) if overlaps else math.nan


def _mean_over_users(
    recommended: Sequence[Sequence[Item]],
    relevant: Sequence[Collection[Item]],
    k: int,
    measure: Callable[[list[Item], set[Item]], float],
) -> float:
    values = [measure(_first_k(items, k), set(wanted)) for items, wanted in _pairs(recommended, relevant, k) if wanted]
    return sum(values) / len(values) if values else math.nan


Left = TypeVar("Left")
Right = TypeVar("Right")


def _pairs(left: Sequence[Left], right: Sequence[Right], k: int) -> zip[tuple[Left, Right]]:
    if k < 1:
        raise ValueError(f"k = {k}: expected at least 1")
    if len(left) != len(right):
        raise ValueError(f"{len(left)} and {len(right)} users: expected one entry a user in both")
    return zip(left, right, strict=True)


def _first_k(items: Sequence[Item], k: int) -> list[Item]:
    return list(dict.fromkeys(items))[:k]
