"""Catalogs that several tests look at, and the folder of plain sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_serve.catalog.catalog import Catalog
from tests.conftest import SHARED_DATA


@pytest.fixture(scope="session")
def beauty_sequences() -> Path:
    """One line a user, ``user item item ...`` in time order, of Amazon "Beauty"."""
    path = SHARED_DATA / "beauty" / "sequences.txt"
    if not path.is_file():
        pytest.skip(f"no data at {path}; set LOKA_TEST_DATA to the folder that holds beauty/")
    return path


@pytest.fixture(scope="session")
def groceries() -> Catalog:
    """Seven items on five SIDs, given out of order.

    Catalog order:   0 milk   1 oat milk   2 cream   3 bread   4 bun    5 soap   6 gift card
    semantic ID      (0,1,0)  (0,1,0)      (0,1,2)   (0,3,1)   (0,3,1)  (2,0,0)  (2,0,1)
    leaf             0        0            1         2         2        3        4
    level-1 node     0        0            0         1         1        2        2
    level-0 node     0        0            0         0         0        1        1
    """
    return Catalog.build(
        item_ids=["soap", "bun", "cream", "oat milk", "milk", "gift card", "bread"],
        semantic_ids=[[2, 0, 0], [0, 3, 1], [0, 1, 2], [0, 1, 0], [0, 1, 0], [2, 0, 1], [0, 3, 1]],
        popularity=[5, 1, 3, 7, 9, 0, 4],
        attributes={
            "department": ["household", "bakery", "dairy", "dairy", "dairy", None, "bakery"],
            "organic": [False, False, True, True, False, None, True],
            "price": [2.5, 1, 1.75, 2.5, 1.0, None, 3],
            "tags": [[], ["fresh"], ["fresh", "cold"], ["vegan", "cold"], "cold", None, ["fresh", "vegan", "fresh"]],
        },
        codebook_sizes=[4, 4, 3],
    )
