"""Ids to indices by the hash table."""

from __future__ import annotations

import numpy as np
import pytest

from loka_serve.catalog import item_index
from loka_serve.catalog.item_index import ItemIndex


@pytest.mark.parametrize("count", [0, 1, 2, 5, 3000])
def test_finds_what_a_dictionary_finds(count: int) -> None:
    item_ids = [f"item-{number * 7}" for number in range(count)]
    known = {item_id: index for index, item_id in enumerate(item_ids)}
    asked = [f"item-{number}" for number in np.random.default_rng(count).integers(0, 7 * count + 7, 500)] + item_ids
    found = ItemIndex(item_ids).find([*asked, "", "item-0 "])
    assert found.tolist() == [known.get(item_id, -1) for item_id in [*asked, "", "item-0 "]]
    assert ItemIndex(item_ids).find([]).tolist() == []


def test_ids_of_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def few_hashes(item_ids: list[str]) -> np.ndarray:
        return np.array([len(item_id) for item_id in item_ids], np.int64)

    monkeypatch.setattr(item_index, "_hashes", few_hashes)
    index = ItemIndex(["a", "b", "cc", "ddd", "eee"])
    assert index.find(["eee", "b", "cc", "a", "ddd", "ffff"]).tolist() == [4, 1, 2, 0, 3, -1]
