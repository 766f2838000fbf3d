"""A tiny synthetic shop: households that walk the same aisle in the same order, so that there is something to learn."""

from __future__ import annotations

import numpy as np

from examples.groceries.prepare import Sequences

ITEMS, BASKET, BASKETS, HOUSEHOLDS = 24, 4, 6, 10
CODEBOOK_SIZES = (4, 4, 2)


def synthetic_sequences() -> Sequences:
    """Household h buys items h, h + 1, h + 2, h + 3 (modulo 24) in each of its six baskets."""
    baskets = [np.sort((household + np.arange(BASKET)) % ITEMS) for household in range(HOUSEHOLDS)]
    items = np.concatenate([np.tile(basket, BASKETS) for basket in baskets]).astype(np.int32)
    rows = BASKET * BASKETS
    generator = np.random.default_rng(0)
    shuffled = np.concatenate([generator.permutation(basket) for basket in np.split(items, len(items) // BASKET)])
    numbers = np.arange(ITEMS)
    return Sequences(
        product_ids=1000 + numbers.astype(np.int64),
        household_ids=np.arange(HOUSEHOLDS, dtype=np.int64),
        items=items,
        random_items=shuffled.astype(np.int32),
        from_the_end=np.tile(np.repeat(np.arange(BASKETS)[::-1], BASKET), HOUSEHOLDS).astype(np.int32),
        households=np.repeat(np.arange(HOUSEHOLDS), rows).astype(np.int32),
        household_offsets=np.arange(HOUSEHOLDS + 1, dtype=np.int64) * rows,
        semantic_ids=np.stack([numbers // 8, numbers // 2 % 4, numbers % 2], axis=1).astype(np.int32),
        codebook_sizes=CODEBOOK_SIZES,
        features=tuple({"age": "65+"} if household % 2 else {} for household in range(HOUSEHOLDS)),
    )
