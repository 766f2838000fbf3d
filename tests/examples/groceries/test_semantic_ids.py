"""Semantic IDs: the pieces by hand-computed values, and no two items share one."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from examples.groceries import semantic_ids


def test_truncated_svd_agrees_with_the_dense_one() -> None:
    matrix = np.random.default_rng(0).standard_normal((30, 20)) * 0.5 ** np.arange(20)
    left, values = semantic_ids.truncated_svd(sparse.csr_matrix(matrix), 3, np.random.default_rng(1))
    expected_left, expected_values, _ = np.linalg.svd(matrix)
    # Subspace iteration converges with (sigma_19 / sigma_3) ** 9: far below the tolerance.
    np.testing.assert_allclose(values, expected_values[:3], rtol=1e-9)
    np.testing.assert_allclose(np.abs((left * expected_left[:, :3]).sum(axis=0)), 1.0, rtol=1e-9)


def test_positive_pointwise_mutual_information_by_hand() -> None:
    # Totals 3 and 1 of 4. Unsmoothed: PMI(0, 0) = log(.5 / .5625) < 0, PMI(0, 1) = log(.25 / .1875).
    counts = sparse.csr_matrix(np.array([[2.0, 1.0], [1.0, 0.0]]))
    information = semantic_ids.positive_pointwise_mutual_information(counts, smoothing=1.0).toarray()
    np.testing.assert_allclose(information, [[0.0, np.log(4 / 3)], [np.log(4 / 3), 0.0]], rtol=1e-12)


def test_items_bought_together_are_close() -> None:
    baskets = np.repeat(np.arange(20), 2)
    items = np.tile([0, 1, 2, 3], 10)  # 0 with 1 and 2 with 3, always
    vectors = semantic_ids.co_purchase_embeddings(
        items.astype(np.int32), baskets.astype(np.int32), 5, 4, np.random.default_rng(0)
    )
    similarity = np.abs(vectors @ vectors.T)
    assert similarity[0, 2] < 0.01 and similarity[0, 3] < 0.01
    assert not vectors[4].any()  # never bought: nothing is known


def test_assignment_of_the_last_level_is_the_cheapest_without_collisions() -> None:
    prefixes = np.array([[0, 0], [0, 0], [0, 1]], dtype=np.int32)
    distances = np.array([[1.0, 2.0, 9.0], [1.0, 5.0, 9.0], [7.0, 8.0, 3.0]])
    # Both of the first two like code 0 best; giving it to the second costs 1 + 2 rather than 1 + 5.
    assert semantic_ids.assign_last_level(prefixes, distances).tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="a prefix holds 2 items, the last codebook only 1 codes"):
        semantic_ids.assign_last_level(prefixes, distances[:, :1])


@pytest.mark.parametrize("make", [semantic_ids.residual_semantic_ids, semantic_ids.shelf_order_semantic_ids])
def test_semantic_ids_are_distinct_within_bounds_and_seeded(make: semantic_ids.Derivation) -> None:
    vectors = np.random.default_rng(0).standard_normal((200, 6))
    vectors[50:60] = vectors[50]  # ten items that nothing tells apart
    sizes = (8, 4, 16)
    codes = make(vectors, np.ones(200), sizes, np.random.default_rng(1))
    assert len(np.unique(codes, axis=0)) == 200
    assert (codes >= 0).all() and (codes < sizes).all()
    assert np.array_equal(codes, make(vectors, np.ones(200), sizes, np.random.default_rng(1)))


def test_shelf_order_counts_products_through() -> None:
    vectors = np.random.default_rng(0).standard_normal((64, 3))
    codes = semantic_ids.shelf_order_semantic_ids(vectors, np.ones(64), (4, 4, 16), np.random.default_rng(1))
    for prefix in np.unique(codes[:, :2], axis=0):
        assert (np.diff(codes[(codes[:, :2] == prefix).all(axis=1), 2]) > 0).all()
    assert np.abs(codes[:, 2] - np.arange(64) / 4).mean() < 1.5  # close to the product's place, in sixteenths
