"""The metrics by hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest

from examples.groceries.metrics import basket_metrics, next_item_metrics, ranks_of


def test_next_item_metrics() -> None:
    metrics = next_item_metrics(np.array([0, 2, 9, 10]))
    assert metrics["hr@10"] == pytest.approx(3 / 4)
    assert metrics["ndcg@10"] == pytest.approx((1 + 1 / 2 + 1 / np.log2(11)) / 4)


def test_basket_metrics() -> None:
    # First household: two of its three items at ranks 0 and 2. Second: its only item is missed.
    metrics = basket_metrics([[5, 1, 7, 2], [4]], [[5, 7, 9], [8]])
    ideal = 1 + 1 / np.log2(3) + 1 / 2
    assert metrics["recall@10"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["ndcg@10"] == pytest.approx((1 + 1 / 2) / ideal / 2)


def test_ties_go_to_the_lower_item() -> None:
    scores = np.array([[0.5, 0.9, 0.5, 0.5]] * 3, dtype=np.float32)
    assert ranks_of(scores, np.array([0, 2, 1])).tolist() == [1, 2, 0]
