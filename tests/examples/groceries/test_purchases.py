"""Purchases are sorted by household, time, basket and product number, and rare products are left out."""

from __future__ import annotations

import numpy as np

from examples.groceries.purchases import Purchases, group


def purchases() -> Purchases:
    # household, basket, time, product; product 7 is bought once, the others twice.
    rows = np.array(
        [(2, 30, 5, 9), (2, 30, 5, 8), (1, 20, 9, 9), (1, 10, 3, 8), (1, 10, 3, 7), (1, 20, 9, 6), (2, 40, 6, 6)]
    )
    return group(*rows.T, minimum_purchases=2)


def test_rows_are_in_time_order_and_rare_products_are_gone() -> None:
    grouped = purchases()
    assert grouped.product_ids.tolist() == [6, 8, 9]
    assert grouped.household_ids.tolist() == [1, 2]
    assert grouped.product_ids[grouped.items].tolist() == [8, 6, 9, 8, 9, 6]
    assert grouped.baskets.tolist() == [0, 1, 1, 2, 2, 3]
    assert grouped.household_offsets.tolist() == [0, 3, 6]
    assert grouped.basket_offsets.tolist() == [0, 1, 3, 5, 6]
    assert grouped.households.tolist() == [0, 0, 0, 1, 1, 1]
    assert grouped.baskets_from_the_end().tolist() == [1, 0, 0, 1, 1, 0]


def test_random_order_keeps_baskets_together_and_is_seeded() -> None:
    grouped = purchases()
    shuffled = [grouped.random_order(seed) for seed in range(20)]
    assert np.array_equal(shuffled[3], grouped.random_order(3))
    for items in shuffled:
        for start, end in zip(grouped.basket_offsets[:-1], grouped.basket_offsets[1:], strict=True):
            assert sorted(items[start:end]) == grouped.items[start:end].tolist()
    assert any(not np.array_equal(items, grouped.items) for items in shuffled)
