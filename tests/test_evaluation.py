"""Ranking metrics against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from loka_serve.evaluation import hit_rate_at_k, ndcg_at_k, recall_at_k, top_k_overlap

RECOMMENDED = [["a", "b", "c", "d"], ["e", "f", "g", "h"], ["i", "j"]]
RELEVANT = [{"b", "d", "x"}, {"z"}, {"j"}]


def test_hit_rate() -> None:
    assert hit_rate_at_k(RECOMMENDED, RELEVANT, 1) == 0.0
    assert hit_rate_at_k(RECOMMENDED, RELEVANT, 2) == 2 / 3
    assert hit_rate_at_k(RECOMMENDED, RELEVANT, 100) == 2 / 3


def test_recall() -> None:
    assert recall_at_k(RECOMMENDED, RELEVANT, 2) == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert recall_at_k(RECOMMENDED, RELEVANT, 4) == pytest.approx((2 / 3 + 0 + 1) / 3)


def test_ndcg() -> None:
    second, fourth = 1 / math.log2(3), 1 / math.log2(5)
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert ndcg_at_k(RECOMMENDED, RELEVANT, 4) == pytest.approx(((second + fourth) / ideal + 0 + second) / 3)
    # Only two of user 0's three relevant items fit into the best possible first 2.
    assert ndcg_at_k(RECOMMENDED, RELEVANT, 2) == pytest.approx((second / (1 + second) + 0 + second) / 3)
    assert ndcg_at_k([["a", "b"]], [{"a", "b"}], 2) == 1.0


def test_a_repeated_item_counts_once() -> None:
    assert recall_at_k([["a", "a", "b"]], [{"a", "b"}], 2) == 1.0
    assert ndcg_at_k([["a", "a", "b"]], [{"a", "b"}], 2) == 1.0
    assert recall_at_k([["a"]], [["a", "a"]], 1) == 1.0


def test_users_without_relevant_items_are_left_out() -> None:
    assert hit_rate_at_k([["a"], ["b"]], [set(), {"b"}], 1) == 1.0
    assert math.isnan(ndcg_at_k([["a"]], [set()], 1))
    assert math.isnan(recall_at_k([], [], 1))


def test_overlap_ignores_order() -> None:
    assert top_k_overlap([[1, 2, 3, 4]], [[4, 3, 2, 1]], 4) == 1.0
    assert top_k_overlap([[1, 2, 3, 4]], [[4, 3, 2, 1]], 2) == 0.0
    assert top_k_overlap([[1, 2, 3], [1, 2, 3]], [[1, 2, 9], [7, 8, 9]], 3) == pytest.approx((2 / 3 + 0) / 2)


def test_overlap_of_short_rankings() -> None:
    assert top_k_overlap([[1, 2]], [[2, 1]], 50) == 1.0
    assert top_k_overlap([[1, 2, 3, 4]], [[1, 2]], 50) == 0.5
    assert top_k_overlap([[]], [[]], 5) == 1.0
    assert math.isnan(top_k_overlap([], [], 5))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="k = 0"):
        hit_rate_at_k(RECOMMENDED, RELEVANT, 0)
    with pytest.raises(ValueError, match="2 and 3 users"):
        top_k_overlap(RECOMMENDED[:2], RECOMMENDED, 3)
