"""Ranking metrics shared by the build's gate and the examples, and how sure one may be of them.

A user's recommendations are item identifiers, best first; a repeated item counts once, at its first place. Relevant
items have binary relevance. Functions in the plural give one value a user; those in the singular average over users.
Users without a relevant item have NaN and are left out of the average; with no user left it is NaN: there is nothing to
measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item", bound=Hashable)
Values = NDArray[np.float64]

RESAMPLES = 1000
CONFIDENCE = 0.95
CALIBRATION_BINS = 10
_RESAMPLED_AT_ONCE = 1 << 20


class Interval(NamedTuple):
    """Where a figure lies with 95 % confidence; both ends NaN if there was nothing to measure."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


def hit_rates(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> Values:
    """Of each user 1 if a relevant item is among the first k recommendations, else 0; float64 [users]."""
    return _by_user(recommended, relevant, k, lambda top, wanted: float(any(item in wanted for item in top)))


def recalls(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> Values:
    """Share of each user's relevant items that are among the first k recommendations; float64 [users]."""
    return _by_user(recommended, relevant, k, lambda top, wanted: sum(item in wanted for item in top) / len(wanted))


def ndcgs(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> Values:
    """Normalised discounted cumulative gain of each user, float64 [users]: gain 1 / log2(rank + 1), over that of the
    best possible first k."""

    def ndcg(top: list[Item], wanted: set[Item]) -> float:
        gain = sum(1.0 / math.log2(rank + 1) for rank, item in enumerate(top, start=1) if item in wanted)
        ideal = sum(1.0 / math.log2(rank + 1) for rank in range(1, min(k, len(wanted)) + 1))
        return gain / ideal

    return _by_user(recommended, relevant, k, ndcg)


def overlaps(first: Sequence[Sequence[Item]], second: Sequence[Sequence[Item]], k: int) -> Values:
    """Share of the first k items that two rankings of each user have in common, whatever their order; float64 [users].

    Where both rankings are shorter than k, the longer one's length takes the place of k; two empty rankings agree.
    """
    shares = []
    for ours, theirs in _pairs(first, second, k):
        top, other = set(_first_k(ours, k)), set(_first_k(theirs, k))
        longest = max(len(top), len(other))
        shares.append(len(top & other) / longest if longest else 1.0)
    return np.array(shares, np.float64)


def hit_rate_at_k(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> float:
    """Share of users with at least one relevant item among their first k recommendations."""
    return mean(hit_rates(recommended, relevant, k))


def recall_at_k(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> float:
    """Mean share of a user's relevant items that are among the first k recommendations."""
    return mean(recalls(recommended, relevant, k))


def ndcg_at_k(recommended: Sequence[Sequence[Item]], relevant: Sequence[Collection[Item]], k: int) -> float:
    """Mean normalised discounted cumulative gain: gain 1 / log2(rank + 1), over that of the best possible first k."""
    return mean(ndcgs(recommended, relevant, k))


def top_k_overlap(first: Sequence[Sequence[Item]], second: Sequence[Sequence[Item]], k: int) -> float:
    """Mean share of the first k items that two rankings have in common; see `overlaps`."""
    return mean(overlaps(first, second, k))


def mean(values: Values) -> float:
    """The average over users, without those who have NaN; NaN if nobody is left."""
    measured = values[~np.isnan(values)]
    return math.fsum(measured) / len(measured) if len(measured) else math.nan


def bootstrap_interval(values: Values, seed: int = 0) -> Interval:
    """95 % interval of the mean over users, from 1,000 resamples of the users with replacement (percentile bootstrap).

    Efron and Tibshirani, *An Introduction to the Bootstrap*, section 13.3. For the difference of two engines give the
    difference of each user: the resamples are then paired. The same values give the same interval.

    Args:
        values: float64 [users]; users with NaN are left out.
    """
    measured = values[~np.isnan(values)]
    if not len(measured):
        return Interval(math.nan, math.nan)
    generator = np.random.default_rng(seed)
    resamples = max(1, min(RESAMPLES, _RESAMPLED_AT_ONCE // len(measured)))  # drawn in pieces: memory stays bounded
    means: list[Values] = []
    for start in range(0, RESAMPLES, resamples):
        drawn = generator.integers(0, len(measured), (min(resamples, RESAMPLES - start), len(measured)))
        means.append(measured[drawn].mean(axis=1))
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(np.concatenate(means), (tail, 1.0 - tail))
    return Interval(float(low), float(high))


def expected_calibration_error(probabilities: Sequence[float], hits: Sequence[bool]) -> float:
    """Mean distance between a predicted probability and the share of hits, over 10 equal bins of the probability.

    Guo et al., *On Calibration of Modern Neural Networks*, equation 3: each bin weighs as many predictions as it holds.
    NaN without predictions.

    Raises:
        ValueError: the two differ in length, or a probability is not between 0 and 1.
    """
    if len(probabilities) != len(hits):
        raise ValueError(f"{len(probabilities)} probabilities and {len(hits)} hits: expected one of each a user")
    predicted, hit = np.asarray(probabilities, np.float64), np.asarray(hits, np.float64)
    if not len(predicted):
        return math.nan
    if not ((predicted >= 0) & (predicted <= 1)).all():
        raise ValueError("probabilities: expected numbers from 0 to 1")
    bins = np.minimum((predicted * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=predicted - hit, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(predicted))


def _by_user(
    recommended: Sequence[Sequence[Item]],
    relevant: Sequence[Collection[Item]],
    k: int,
    measure: Callable[[list[Item], set[Item]], float],
) -> Values:
    values = [
        measure(_first_k(items, k), set(wanted)) if wanted else math.nan
        for items, wanted in _pairs(recommended, relevant, k)
    ]
    return np.array(values, np.float64)


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
