"""The baselines on the ring, where the next item is certain."""

from __future__ import annotations

import pytest

from examples.beauty.baselines import evaluate
from examples.beauty.sequences import TEST
from tests.examples.beauty.data import synthetic_sequences


def test_co_occurrence_knows_the_ring() -> None:
    results = evaluate(synthetic_sequences(), TEST)
    for mode in ("plain", "history_excluded"):
        # Every pair of neighbours stands in the training events, and nothing follows an item as often as its neighbour.
        assert results["co_occurrence"][mode]["recall@5"] == 1.0
        assert results["co_occurrence"][mode]["ndcg@5"] > results["popularity"][mode]["ndcg@5"]
    assert results["co_occurrence"]["history_excluded"]["ndcg@5"] == 1.0


def test_what_nothing_tells_apart_is_ranked_in_the_middle() -> None:
    # On the ring all items are about as popular: ten of 24 are some way from all and from none.
    recall = evaluate(synthetic_sequences(), TEST)["popularity"]["plain"]["recall@10"]
    assert recall == pytest.approx(10 / 24, abs=0.25)
