"""The compiled trie: hand-checked small ones, and what must hold for all."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.trie import compile_trie
from loka_serve.errors import CatalogError
from tests.catalog.strategies import Items, items


def test_hand_checked_trie(groceries: Catalog) -> None:
    trie = groceries.trie
    assert trie.levels == 3
    assert trie.codebook_sizes == (4, 4, 3)
    assert trie.node_counts == (2, 3, 5)
    assert [tokens.tolist() for tokens in trie.tokens] == [[0, 2], [1, 3, 0], [0, 2, 1, 0, 1]]
    assert [offsets.tolist() for offsets in trie.child_offsets] == [[0, 2, 3], [0, 2, 3, 5]]
    assert trie.item_offsets.tolist() == [0, 2, 3, 5, 6, 7]
    assert [parents.tolist() for parents in trie.parents] == [[0, 0, 1], [0, 0, 1, 2, 2]]
    assert trie.semantic_ids().tolist() == [[0, 1, 0], [0, 1, 2], [0, 3, 1], [2, 0, 0], [2, 0, 1]]
    assert {array.dtype for array in trie.tokens} == {np.dtype(np.int32)}
    assert {array.dtype for array in (*trie.child_offsets, trie.item_offsets)} == {np.dtype(np.int64)}


def test_one_item() -> None:
    trie, order = compile_trie(np.array([[3, 0]]))
    assert trie.node_counts == (1, 1)
    assert trie.codebook_sizes == (4, 1)
    assert trie.child_offsets[0].tolist() == [0, 1]
    assert trie.item_offsets.tolist() == [0, 1]
    assert order.tolist() == [0]


def test_order_is_by_semantic_id_then_popularity_then_input() -> None:
    semantic_ids = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0, 0]], dtype=np.uint16)
    trie, order = compile_trie(semantic_ids, np.array([1.0, 0.0, 2.0, 1.0, 0.0]))
    assert order.tolist() == [4, 1, 2, 0, 3]
    assert trie.item_offsets.tolist() == [0, 1, 2, 5]


def test_leaf_of_what_is_not_there(groceries: Catalog) -> None:
    trie = groceries.trie
    assert trie.leaf_of((0, 3, 1)) == 2
    assert trie.leaf_of([2, 0, 1]) == 4
    absent = [
        (0, 3, 0),
        (0, 0, 0),
        (1, 0, 0),
        (3, 3, 2),
        (0, 1, 3),
        (-1, 0, 0),
        (2**70, 0, 0),
        (0, 1),
        (0, 1, 0, 0),
        (),
    ]
    assert [trie.leaf_of(semantic_id) for semantic_id in absent] == [-1] * len(absent)


def test_leaves_of_what_is_and_is_not_there(groceries: Catalog) -> None:
    trie = groceries.trie
    ids = [(0, 3, 1), (0, 3, 0), (2, 0, 1), (0, 0, 0), (1, 0, 0), (3, 3, 2), (0, 1, 3), (-1, 0, 0), (2**40, 0, 0)]
    leaves = trie.leaves_of(np.array(ids))
    assert leaves.dtype == np.int32
    assert leaves.tolist() == [2, -1, 4, -1, -1, -1, -1, -1, -1]
    assert trie.leaves_of(np.array([[0, 1], [2, 0]])).tolist() == [-1, -1]  # another number of levels
    assert trie.leaves_of(np.empty((0, 3), np.int32)).tolist() == []


@settings(deadline=None, max_examples=50)
@given(items())
def test_leaves_of_is_leaf_of_for_each(drawn: Items) -> None:
    trie, _ = compile_trie(np.array(drawn.semantic_ids), None, drawn.codebook_sizes)
    everything = list(itertools.product(*(range(size + 1) for size in drawn.codebook_sizes)))
    assert trie.leaves_of(np.array(everything)).tolist() == [trie.leaf_of(codes) for codes in everything]


@pytest.mark.parametrize(
    ("semantic_ids", "sizes", "message"),
    [
        (np.zeros((0, 3), np.int32), None, "at least one item"),
        (np.zeros((2, 1), np.int32), None, "2 to 5 levels, got 1"),
        (np.zeros((2, 6), np.int32), None, "2 to 5 levels, got 6"),
        (np.zeros(4, np.int32), None, r"integers \[items, levels\], got int32 \[4\]"),
        (np.zeros((2, 2), np.float32), None, "integers .* got float32"),
        (np.array([[0, -1]]), None, "codes in 0..*got -1..0"),
        (np.array([[0, 2**31 - 1]]), None, "codes in 0"),
        (np.array([[0, 4], [0, 7]]), (1, 7), "level 1 has code 7, expected less than 7"),
        (np.array([[0, 4]]), (8,), "expected 2 sizes, one for each level, got 1"),
        (np.array([[0, 4]]), (8, 0), "expected sizes in 1"),
    ],
)
def test_bad_input(semantic_ids: np.ndarray[Any, Any], sizes: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        compile_trie(semantic_ids, None, sizes)


def test_popularity_of_another_length() -> None:
    with pytest.raises(CatalogError, match="popularity: expected one number for each of 1 items"):
        compile_trie(np.array([[0, 1]]), np.array([1.0, 2.0]))


@settings(deadline=None, max_examples=50)
@given(items())
def test_trie_holds_exactly_the_semantic_ids_given(drawn: Items) -> None:
    trie, order = compile_trie(np.array(drawn.semantic_ids), np.array(drawn.popularity), drawn.codebook_sizes)
    given_ids = {tuple(codes) for codes in drawn.semantic_ids}
    assert [tuple(codes) for codes in trie.semantic_ids().tolist()] == sorted(given_ids)
    everything = itertools.product(*map(range, drawn.codebook_sizes))
    assert {codes for codes in everything if trie.leaf_of(codes) >= 0} == given_ids
    for level in range(trie.levels):
        prefixes = sorted({codes[: level + 1] for codes in given_ids})
        assert trie.tokens[level].tolist() == [prefix[-1] for prefix in prefixes]
    # The items of each leaf, found by walking down from the root.
    for leaf, codes in enumerate(sorted(given_ids)):
        node = trie.tokens[0].tolist().index(codes[0])
        for level, code in enumerate(codes[1:]):
            begin, end = trie.child_offsets[level][node : node + 2]
            node = int(begin) + trie.tokens[level + 1][begin:end].tolist().index(code)
        assert node == leaf == trie.leaf_of(codes)
        rows = order[trie.item_offsets[leaf] : trie.item_offsets[leaf + 1]].tolist()
        assert {tuple(drawn.semantic_ids[row]) for row in rows} == {codes}
        assert rows == sorted(rows, key=lambda row: (-drawn.popularity[row], row))
    assert sorted(order.tolist()) == list(range(len(drawn.item_ids)))


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 5), st.data())
def test_wide_codebooks(levels: int, data: st.DataObject) -> None:
    """Codes up to 8,191 at 5 levels need 65 bits together: nothing may pack them into one integer."""
    semantic_ids = data.draw(
        st.lists(st.tuples(*[st.sampled_from((0, 1, 8190, 8191))] * levels), min_size=1, max_size=20)
    )
    trie, _ = compile_trie(np.array(semantic_ids), None, [8192] * levels)
    assert [tuple(codes) for codes in trie.semantic_ids().tolist()] == sorted(set(semantic_ids))
