"""Baselines by hand-computed values on two households."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from examples.groceries import baselines
from examples.groceries.prepare import Sequences
from tests.examples.groceries.data import synthetic_sequences


def two_households() -> Sequences:
    """Items 0..3. Household 0: [0, 1], [0, 2], last [1, 3]. Household 1: [1, 2], last [2]."""
    return dataclasses.replace(
        synthetic_sequences(),
        product_ids=np.arange(4),
        household_ids=np.arange(2),
        items=np.array([0, 1, 0, 2, 1, 3, 1, 2, 2], dtype=np.int32),
        random_items=np.array([0, 1, 0, 2, 1, 3, 1, 2, 2], dtype=np.int32),
        from_the_end=np.array([2, 2, 1, 1, 0, 0, 1, 1, 0], dtype=np.int32),
        households=np.array([0, 0, 0, 0, 0, 0, 1, 1, 1], dtype=np.int32),
        household_offsets=np.array([0, 6, 9]),
        semantic_ids=np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]], dtype=np.int32),
        features=({}, {}),
    )


def test_fit_uses_the_training_rows_only() -> None:
    sequences = two_households()
    fitted = baselines.fit(sequences, sequences.items, held_out=0)
    np.testing.assert_allclose(fitted.popularity, np.array([2, 2, 2, 0]) / 6)
    # 0 -> 1, 1 -> 0 and 0 -> 2 in household 0; 1 -> 2 in household 1; nothing across households or into last baskets.
    expected = [[0, 0.5, 0.5, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(fitted.transitions.toarray(), expected)


def test_scores_of_both_positions_of_a_basket() -> None:
    sequences = two_households()
    fitted = baselines.fit(sequences, sequences.items, held_out=0)
    history, ages, targets = next(baselines.households(sequences, sequences.items, held_out=0))
    assert history.tolist() == [0, 1, 0, 2] and ages.tolist() == [2, 2, 1, 1] and targets.tolist() == [1, 3]
    scores = baselines.score_positions(fitted, history, ages, targets)
    # 1e-5 covers the 1e-6 tie-break by popularity.
    np.testing.assert_allclose(scores["own_repeat"], [[0.5, 0.25, 0.25, 0], [0.4, 0.4, 0.2, 0]], atol=1e-5)
    np.testing.assert_allclose(scores["own_repeat_decayed"][0], [0.97**2 + 0.97, 0.97**2, 0.97, 0], atol=1e-5)
    # Nothing is known to follow item 2; item 0 or 2 follows item 1.
    np.testing.assert_allclose(scores["markov"], [[0, 0, 0, 0], [0.5, 0, 0.5, 0]], atol=1e-5)
    expected = 0.5 * np.array([0.5, 0, 0.5, 0]) + 0.4 * np.array([0.4, 0.4, 0.2, 0]) + 0.1 * np.array([1, 1, 1, 0]) / 3
    np.testing.assert_allclose(scores["blend"][1], expected, atol=1e-6)


def test_evaluation_of_a_shop_that_repeats_itself() -> None:
    sequences = synthetic_sequences()
    results = baselines.evaluate(sequences, sequences.items)
    # Every household buys the same four items again: own-repeat has them all in its first four.
    assert results["next_item"]["own_repeat"]["hr@10"] == 1.0
    assert results["basket"]["own_repeat"] == {"recall@10": pytest.approx(1.0), "ndcg@10": pytest.approx(1.0)}
    assert results["next_item"]["popularity"]["hr@10"] < 1.0


def test_top_items_are_sorted_with_ties_to_the_lower_item() -> None:
    scores = np.zeros((1, 100), dtype=np.float32)
    scores[0, [90, 3, 40]] = [1.0, 2.0, 1.0]
    assert baselines.top_items(scores)[0, :3].tolist() == [3, 40, 90]
