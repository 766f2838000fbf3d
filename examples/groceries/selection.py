"""Which validated weights of a training run, or of several, are the best."""

from __future__ import annotations

# What each validation figure has to reach. In random order that is own-repeat's on the validation baskets, the
# strongest baseline there; the others are what the example promises on the last baskets.
TARGETS = {
    ("product_number", "hr@10"): 0.195,
    ("product_number", "ndcg@10"): 0.115,
    ("random", "hr@10"): 0.1041,
    ("random", "ndcg@10"): 0.0558,
    ("basket", "recall@10"): 0.155,
    ("basket", "ndcg@10"): 0.170,
}


def selection_score(metrics: dict[str, dict[str, float]]) -> float:
    """The least of all validation figures in multiples of its target: no measure is bought with another."""
    return min(metrics[measure][name] / target for (measure, name), target in TARGETS.items())
