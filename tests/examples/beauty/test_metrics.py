"""Ranking metrics by hand."""

from __future__ import annotations

import numpy as np
import pytest

from examples.beauty.metrics import MISSED, ranking_metrics, ranks_in, without_history


def test_metrics_by_hand() -> None:
    metrics = ranking_metrics(np.array([0, 4, 5, 9, 10, MISSED]))
    assert metrics["recall@5"] == pytest.approx(2 / 6) and metrics["recall@10"] == pytest.approx(4 / 6)
    gains = [1 / np.log2(rank + 2) for rank in (0, 4, 5, 9)]
    assert metrics["ndcg@5"] == pytest.approx(sum(gains[:2]) / 6)
    assert metrics["ndcg@10"] == pytest.approx(sum(gains) / 6)


def test_ranks_and_histories_taken_out() -> None:
    ranked = np.array([[3, 1, 2, 7], [5, 6, -1, -1]])
    assert ranks_in(ranked, np.array([2, 9])).tolist() == [2, MISSED]
    left = without_history(ranked, np.array([[1, 3], [6, -1]]))
    assert left.tolist() == [[2, 7, -1, -1], [5, -1, -1, -1]]
    assert ranks_in(left, np.array([2, 6])).tolist() == [0, MISSED]
