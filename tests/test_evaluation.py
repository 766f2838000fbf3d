"""Ranking metrics against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loka_serve.evaluation import (
    bootstrap_interval,
    expected_calibration_error,
    hit_rate_at_k,
    ndcg_at_k,
    recall_at_k,
    top_k_overlap,
)

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


def test_bootstrap_interval_of_a_known_distribution() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(values)
    error = values.std() / 20
    # Of 1,000 resamples the 2.5 % quantile itself is uncertain to about a tenth of the standard error.
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.25 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.25 * error)
    assert bootstrap_interval(values) == (low, high)


def test_bootstrap_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    generator = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        low, high = bootstrap_interval((generator.random(100) < 0.3).astype(np.float64))
        held += low <= 0.3 <= high
    assert 180 <= held <= 199  # binomial(200, .95): three standard deviations are 9


def test_bootstrap_interval_leaves_users_without_a_value_out() -> None:
    assert bootstrap_interval(np.array([0.5, math.nan, 0.5])) == (0.5, 0.5)
    assert all(map(math.isnan, bootstrap_interval(np.array([math.nan]))))


def test_calibration_error_by_hand() -> None:
    # Bin .3: two predictions of .3 and .38, one hit, gap .16; bin .9: one of .9, a hit, gap .1.
    error = expected_calibration_error([0.3, 0.9, 0.38], [True, True, False])
    assert error == pytest.approx((abs(0.3 + 0.38 - 1) + abs(0.9 - 1)) / 3)
    assert expected_calibration_error([1.0, 0.0], [True, False]) == 0.0
    assert math.isnan(expected_calibration_error([], []))
    with pytest.raises(ValueError, match="from 0 to 1"):
        expected_calibration_error([1.5], [True])
    with pytest.raises(ValueError, match="1 probabilities and 2 hits"):
        expected_calibration_error([0.5], [True, False])
