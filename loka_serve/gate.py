"""The gate: whether the quantized model still recommends what the BF16 model does, on held-out histories."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka_serve.catalog.catalog import Catalog
from loka_serve.decoding.expansion import expand
from loka_serve.engines.base import Engine, EngineRequest, RequestBatch
from loka_serve.errors import QuantizationError
from loka_serve.evaluation import (
    Interval,
    Values,
    bootstrap_interval,
    expected_calibration_error,
    hit_rates,
    mean,
    ndcgs,
    overlaps,
    recalls,
)

QUALITY_KS = (5, 10, 50)
LEAST_ROWS = 30
"""Below so many histories a bootstrapped interval is itself too narrow: the resamples hardly differ."""
LEAST_CATALOG = 4
"""A catalog of fewer SIDs than this many times K makes rankings overlap whatever the scores are."""
TELLING_WIDTH = 0.2
"""An interval of Recall's change wider than this share of Recall could hide any loss that FP8 may bring."""


@dataclass(frozen=True)
class Ranking:
    """What an engine recommends for one history, best first.

    Attributes:
        items: item indices.
        scores: log-probability of each item's SID.
        leaves: leaf of each item's SID.
    """

    items: tuple[int, ...]
    scores: tuple[float, ...]
    leaves: tuple[int, ...]


@dataclass(frozen=True)
class Quality:
    """A ranking metric of the two engines, and the 95 % interval of its change from user to user."""

    bf16: float
    quantized: float
    change: Interval


@dataclass(frozen=True)
class Calibration:
    """How far scores can be read as probabilities.

    Attributes:
        bf16_error, quantized_error: expected calibration error of the first SID's probability against whether one of
            the next items has that SID; None when no history has a known target.
        score_shift: mean change of an item's log-probability against BF16, over items that both rank; nats.
        score_distance: the mean absolute change; nats.
    """

    bf16_error: float | None
    quantized_error: float | None
    score_shift: float
    score_distance: float


@dataclass(frozen=True)
class GateResult:
    """How far two engines agree, and how well each ranks what users took next. Intervals are bootstrapped, 95 %.

    Attributes:
        rows: held-out histories compared.
        top_k: K of the overlap.
        top_1_agreement: share of histories with the same first item.
        top_k_overlap: mean share of the first K items in common.
        min_top_k_overlap: the threshold that decides.
        quality: by metric; empty when no history has a known target.
        warnings: why these histories say less than the figures look like; a sentence each.
    """

    rows: int
    top_k: int
    top_1_agreement: float
    top_1_interval: Interval
    top_k_overlap: float
    top_k_interval: Interval
    min_top_k_overlap: float
    quality: Mapping[str, Quality]
    calibration: Calibration
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.top_k_overlap >= self.min_top_k_overlap

    def to_dict(self) -> dict[str, Any]:
        """The ``gate.json`` form."""
        calibration = self.calibration
        return {
            "passed": self.passed,
            "rows": self.rows,
            "top_k": self.top_k,
            "top_1_agreement": self.top_1_agreement,
            "top_1_interval": list(self.top_1_interval),
            "top_k_overlap": self.top_k_overlap,
            "top_k_interval": list(self.top_k_interval),
            "min_top_k_overlap": self.min_top_k_overlap,
            "quality": {
                metric: {"bf16": value.bf16, "quantized": value.quantized, "change_interval": list(value.change)}
                for metric, value in self.quality.items()
            },
            "calibration": {
                "expected_calibration_error": {
                    "bf16": calibration.bf16_error,
                    "quantized": calibration.quantized_error,
                },
                "score_shift_nats": _or_none(calibration.score_shift),
                "score_distance_nats": _or_none(calibration.score_distance),
            },
            "warnings": list(self.warnings),
        }


def recommend_items(
    engine: Engine,
    catalog: Catalog,
    requests: Sequence[EngineRequest],
    num_items: int,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Ranking]:
    """The first `num_items` items for each request.

    Raises:
        QuantizationError: the engine gave a score that is not a number.
    """
    ranked: list[Ranking] = []
    for start in range(0, len(requests), engine.limits.batch):
        batch = RequestBatch(tuple(requests[start : start + engine.limits.batch]))
        result = engine.recommend(batch)
        if result.failed.any():
            row = start + int(result.failed.argmax())
            raise QuantizationError(f"held-out history {row}: the {engine.name} engine's scores are not numbers")
        for leaves, scores in zip(result.leaves, result.scores, strict=True):
            items = expand(leaves, scores, catalog, None, num_items)
            indices = tuple(item.item_index for item in items)
            of_items = tuple(int(catalog.leaf_of_item[index]) for index in indices)
            ranked.append(Ranking(indices, tuple(item.score for item in items), of_items))
        progress(len(batch))
    return ranked


def compare(
    quantized: Sequence[Ranking],
    bf16: Sequence[Ranking],
    targets: Sequence[Collection[int]],
    catalog: Catalog,
    top_k: int,
    min_top_k_overlap: float,
) -> GateResult:
    """Compare the rankings of two engines for the same histories.

    Args:
        quantized, bf16: by history.
        targets: item indices that each user took next; may be empty.
        catalog: that the items are of.
    """
    ours, theirs = [ranking.items for ranking in quantized], [ranking.items for ranking in bf16]
    quality = _quality(ours, theirs, targets, top_k)
    first, common = overlaps(ours, theirs, 1), overlaps(ours, theirs, top_k)
    interval = bootstrap_interval(common)
    warnings = [
        *_agreement_warnings(common, interval, min_top_k_overlap, top_k, catalog.trie.leaf_count),
        *_quality_warnings(quality, sum(map(bool, targets))),
    ]
    return GateResult(
        rows=len(bf16),
        top_k=top_k,
        top_1_agreement=mean(first),
        top_1_interval=bootstrap_interval(first),
        top_k_overlap=mean(common),
        top_k_interval=interval,
        min_top_k_overlap=min_top_k_overlap,
        quality=quality,
        calibration=_calibration(quantized, bf16, targets, catalog),
        warnings=tuple(warnings),
    )


def _quality(
    ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]], targets: Sequence[Collection[int]], top_k: int
) -> dict[str, Quality]:
    if not any(targets):
        return {}
    quality = {}
    for k in sorted({min(k, top_k) for k in QUALITY_KS}):
        for name, metric in (("hit_rate", hit_rates), ("recall", recalls), ("ndcg", ndcgs)):
            before, after = metric(theirs, targets, k), metric(ours, targets, k)
            quality[f"{name}@{k}"] = Quality(mean(before), mean(after), bootstrap_interval(after - before))
    return quality


def _calibration(
    quantized: Sequence[Ranking], bf16: Sequence[Ranking], targets: Sequence[Collection[int]], catalog: Catalog
) -> Calibration:
    shifts = []
    for ours, theirs in zip(quantized, bf16, strict=True):
        before = dict(zip(theirs.items, theirs.scores, strict=True))
        pairs = zip(ours.items, ours.scores, strict=True)
        shifts += [score - before[item] for item, score in pairs if item in before]
    return Calibration(
        bf16_error=_calibration_error(bf16, targets, catalog),
        quantized_error=_calibration_error(quantized, targets, catalog),
        score_shift=float(np.mean(shifts)) if shifts else math.nan,
        score_distance=float(np.mean(np.abs(shifts))) if shifts else math.nan,
    )


def _calibration_error(
    rankings: Sequence[Ranking], targets: Sequence[Collection[int]], catalog: Catalog
) -> float | None:
    probabilities, hits = [], []
    for ranking, wanted in zip(rankings, targets, strict=True):
        if wanted and ranking.items:
            probabilities.append(min(1.0, math.exp(ranking.scores[0])))  # rounding may take a sure one above 1
            hits.append(ranking.leaves[0] in {int(catalog.leaf_of_item[item]) for item in wanted})
    return expected_calibration_error(probabilities, hits) if probabilities else None


def _agreement_warnings(common: Values, interval: Interval, threshold: float, top_k: int, leaves: int) -> list[str]:
    warnings = []
    if len(common) < LEAST_ROWS:
        warnings.append(
            f"{len(common)} held-out histories are too few: the intervals say little below {LEAST_ROWS}, "
            "and a gate should have at least 100 (--gate-rows)"
        )
    elif interval.low < threshold < interval.high:
        distance = abs(mean(common) - threshold)
        # An interval shrinks with the square root of the rows: so many would let it end at the threshold.
        needed = math.ceil(len(common) * (interval.width / 2 / distance) ** 2) if distance else None
        enough = f"; about {needed} would" if needed is not None and needed < 1_000_000 else ""
        warnings.append(
            f"{len(common)} held-out histories do not decide: the 95 % interval of the overlap, {interval.low:.3f} to "
            f"{interval.high:.3f}, holds the threshold {threshold:g}{enough}"
        )
    if leaves < LEAST_CATALOG * top_k:
        warnings.append(
            f"the catalog has {leaves} semantic IDs, fewer than {LEAST_CATALOG} x {top_k}: any two rankings of so few "
            f"overlap in their first {top_k}; a smaller --gate-top-k says more"
        )
    return warnings


def _quality_warnings(quality: Mapping[str, Quality], with_target: int) -> list[str]:
    recall = next((name for name in ("recall@10", *sorted(quality)) if name in quality and "recall" in name), None)
    if recall is None:
        return ["no held-out history has a target that the catalog knows: Recall and NDCG are not measured"]
    value = quality[recall]
    if value.bf16 == 0:
        return [f"none of {with_target} targets is in BF16's first {recall.partition('@')[2]}: Recall says nothing"]
    if value.change.width > TELLING_WIDTH * value.bf16:
        low, high = value.change.low / value.bf16, value.change.high / value.bf16
        return [
            f"{with_target} histories with a target are too few for {recall}: its change against BF16 is between "
            f"{low:+.0%} and {high:+.0%} with 95 % confidence"
        ]
    return []


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
