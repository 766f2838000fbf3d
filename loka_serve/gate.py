"""The gate: whether the quantized model still recommends what the BF16 model does, on held-out histories."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loka_serve.catalog.catalog import Catalog
from loka_serve.decoding.expansion import expand
from loka_serve.engines.base import Engine, EngineRequest, RequestBatch
from loka_serve.errors import QuantizationError
from loka_serve.evaluation import hit_rate_at_k, ndcg_at_k, recall_at_k, top_k_overlap

QUALITY_KS = (5, 10, 50)


@dataclass(frozen=True)
class GateResult:
    """How far two engines agree, and how well each ranks what users took next.

    Attributes:
        rows: held-out histories compared.
        top_k: K of the overlap.
        top_1_agreement: share of histories with the same first item.
        top_k_overlap: mean share of the first K items in common.
        min_top_k_overlap: the threshold that decides.
        quality: metric -> {"bf16", "quantized"}; empty when no history has a known target.
    """

    rows: int
    top_k: int
    top_1_agreement: float
    top_k_overlap: float
    min_top_k_overlap: float
    quality: Mapping[str, Mapping[str, float]]

    @property
    def passed(self) -> bool:
        return self.top_k_overlap >= self.min_top_k_overlap

    def to_dict(self) -> dict[str, Any]:
        """The ``gate.json`` form."""
        return {
            "passed": self.passed,
            "rows": self.rows,
            "top_k": self.top_k,
            "top_1_agreement": self.top_1_agreement,
            "top_k_overlap": self.top_k_overlap,
            "min_top_k_overlap": self.min_top_k_overlap,
            "quality": {metric: dict(values) for metric, values in self.quality.items()},
        }


def recommend_items(
    engine: Engine,
    catalog: Catalog,
    requests: Sequence[EngineRequest],
    num_items: int,
    progress: Callable[[int], object] = lambda done: None,
) -> list[list[int]]:
    """The first `num_items` item indices for each request, best first.

    Raises:
        QuantizationError: the engine gave a score that is not a number.
    """
    ranked: list[list[int]] = []
    for start in range(0, len(requests), engine.limits.batch):
        batch = RequestBatch(tuple(requests[start : start + engine.limits.batch]))
        result = engine.recommend(batch)
        if result.failed.any():
            row = start + int(result.failed.argmax())
            raise QuantizationError(f"held-out history {row}: the {engine.name} engine's scores are not numbers")
        for leaves, scores in zip(result.leaves, result.scores, strict=True):
            ranked.append([item.item_index for item in expand(leaves, scores, catalog, None, num_items)])
        progress(len(batch))
    return ranked


def compare(
    quantized: Sequence[Sequence[int]],
    bf16: Sequence[Sequence[int]],
    targets: Sequence[Collection[int]],
    top_k: int,
    min_top_k_overlap: float,
) -> GateResult:
    """Compare the rankings of two engines for the same histories.

    Args:
        quantized, bf16: item indices by history, best first.
        targets: item indices that each user took next; may be empty.
    """
    quality: dict[str, dict[str, float]] = {}
    if any(targets):
        for k in sorted({min(k, top_k) for k in QUALITY_KS}):
            for name, metric in (("hit_rate", hit_rate_at_k), ("recall", recall_at_k), ("ndcg", ndcg_at_k)):
                quality[f"{name}@{k}"] = {
                    "bf16": metric(bf16, targets, k),
                    "quantized": metric(quantized, targets, k),
                }
    return GateResult(
        rows=len(bf16),
        top_k=top_k,
        top_1_agreement=top_k_overlap(quantized, bf16, 1),
        top_k_overlap=top_k_overlap(quantized, bf16, top_k),
        min_top_k_overlap=min_top_k_overlap,
        quality=quality,
    )
