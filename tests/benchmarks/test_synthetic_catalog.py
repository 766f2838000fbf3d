"""The made-up catalog is a valid trie of the promised size, and skewed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.synthetic_catalog import skewed_trie
from loka_serve.catalog.trie import compile_trie


@pytest.mark.parametrize(("items", "sizes"), [(5000, (64, 64, 64)), (300, (8, 16, 8)), (1, (2, 2)), (50, (4, 3, 5, 2))])
def test_same_arrays_as_the_compiler(items: int, sizes: tuple[int, ...]) -> None:
    trie = skewed_trie(items, sizes, seed=3)
    semantic_ids = trie.semantic_ids()
    assert trie.item_count == trie.leaf_count == items == len(np.unique(semantic_ids, axis=0))
    expected, _ = compile_trie(semantic_ids, codebook_sizes=sizes)
    assert trie.codebook_sizes == expected.codebook_sizes
    for name in ("tokens", "child_offsets"):
        for found, array in zip(getattr(trie, name), getattr(expected, name), strict=True):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
    assert trie.item_offsets.dtype == expected.item_offsets.dtype
    np.testing.assert_array_equal(trie.item_offsets, expected.item_offsets)


def test_a_few_prefixes_hold_most_items() -> None:
    trie = skewed_trie(100_000, (512, 512, 512), seed=0)
    items_below = np.sort(np.bincount(trie.semantic_ids()[:, 0], minlength=512))[::-1]
    assert items_below[:51].sum() > 0.35 * trie.item_count  # a tenth of the codes
    assert items_below[0] > 20 * np.median(items_below)
    children = np.diff(trie.child_offsets[0])
    assert children.max() > 5 * np.median(children)


def test_a_seed_is_a_catalog() -> None:
    first, same, other = (skewed_trie(500, (32, 32, 32), seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.semantic_ids(), same.semantic_ids())
    assert not np.array_equal(first.semantic_ids(), other.semantic_ids())


def test_too_many_items_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 32"):
        skewed_trie(33, (4, 4, 4))
