"""The compiled catalog: look-ups, order, version, and the real Amazon files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.readers import read_catalog
from loka_serve.errors import CatalogError
from tests.catalog.strategies import Items, items


def test_look_ups(groceries: Catalog) -> None:
    assert groceries.item_ids == ["milk", "oat milk", "cream", "bread", "bun", "soap", "gift card"]
    assert groceries.item_count == 7
    assert groceries.levels == 3
    assert groceries.codebook_sizes == (4, 4, 3)
    assert groceries.leaf_of_item.tolist() == [0, 0, 1, 2, 2, 3, 4]
    assert groceries.popularity.tolist() == [9, 7, 3, 4, 1, 5, 0]
    assert groceries.index_of("bread") == 3
    assert groceries.index_of("caviar") is None
    assert groceries.indices_of(["bread", "caviar", "bread"]).tolist() == [3, -1, 3]
    assert groceries.indices_of([]).tolist() == []
    assert groceries.semantic_id(3) == (0, 3, 1)
    assert groceries.semantic_ids([6, 0]).tolist() == [[2, 0, 1], [0, 1, 0]]
    assert groceries.semantic_ids([]).shape == (0, 3)
    assert groceries.items_of(2) == range(3, 5)


def test_items_of_one_semantic_id_and_popularity_are_ordered_by_id() -> None:
    catalog = Catalog.build(["é", "b", "a", "B"], [[0, 0]] * 4)
    assert catalog.item_ids == ["B", "a", "b", "é"]
    assert catalog.popularity.tolist() == [0, 0, 0, 0]


def test_numpy_columns() -> None:
    plain = Catalog.build([10, 9], [[0, 1], [1, 0]], [0.5, 2])
    arrays = Catalog.build(
        np.array([10, 9]).tolist(), np.array([[0, 1], [1, 0]], np.int16), np.array([0.5, 2], np.float32)
    )
    listed = Catalog.build(list(np.array([10, 9])), list(np.array([[0, 1], [1, 0]])), list(np.array([0.5, 2])))
    assert plain.item_ids == ["10", "9"]
    assert plain.version == arrays.version == listed.version


def test_columns_of_different_lengths() -> None:
    with pytest.raises(ValueError, match=r"columns of equal length, got lengths \[1, 2\]"):
        Catalog.build(["a", "b"], [[0, 0]])


@pytest.mark.parametrize(
    ("item_id", "semantic_id", "popularity", "attribute", "message"),
    [
        ("a", [0, 1], 0, None, '1: item_id: expected distinct ids, "a" is already at position 0'),
        ("", [0, 1], 0, None, "1: item_id: expected a string"),
        ("\ud800", [0, 1], 0, None, "1: item_id: expected a string"),
        (True, [0, 1], 0, None, "1: item_id: expected a string"),
        ("b", [0, 1, 2], 0, None, "1: semantic_id: expected 2 levels, got 3"),
        ("b", [], 0, None, "1: semantic_id: expected 2 levels, got 0"),
        ("b", "01", 0, None, "1: semantic_id: expected a list of integers, got '01'"),
        ("b", [0, 1.5], 0, None, "1: semantic_id: expected an integer as code of level 1, got 1.5"),
        ("b", [True, 1], 0, None, "1: semantic_id: expected an integer as code of level 0, got True"),
        ("b", [0, -1], 0, None, r"1: semantic_id: level 1 has code -1, expected 0\.\.2147483646"),
        ("b", [2**40, 1], 0, None, "1: semantic_id: level 0 has code 1099511627776"),
        ("b", [0, 1], float("nan"), None, "1: popularity: expected a finite number, got nan"),
        ("b", [0, 1], 1e39, None, "1: popularity: expected a finite number, got 1e"),
        ("b", [0, 1], 10**400, None, "1: popularity: expected a finite number, got 1000"),
        ("b", [0, 1], "many", None, "1: popularity: expected a finite number, got 'many'"),
        ("b", [0, 1], True, None, "1: popularity: expected a finite number, got True"),
        ("b", [0, 1], 0, float("inf"), "1: shelf: expected a string, a finite number, a boolean .*, got inf"),
        ("b", [0, 1], 0, {"x": 1}, "1: shelf: expected .*, got dict"),
        ("b", [0, 1], 0, ["x", None], "1: shelf: expected .*, got NoneType"),
    ],
)
def test_bad_items(item_id: str, semantic_id: list[int], popularity: float, attribute: object, message: str) -> None:
    with pytest.raises(CatalogError, match=f"items, position {message}"):
        Catalog.build(["a", item_id], [[0, 0], semantic_id], [0, popularity], {"shelf": ["x", attribute]})


def test_code_beyond_its_codebook() -> None:
    message = "items, position 2: semantic_id: level 1 has code 5, expected less than the codebook size 5"
    with pytest.raises(CatalogError, match=message):
        Catalog.build(["a", "b", "c"], [[0, 0], [1, 4], [0, 5]], codebook_sizes=[2, 5])


def test_no_items() -> None:
    with pytest.raises(CatalogError, match="items: expected at least one item, found none"):
        Catalog.build([], [])


@settings(deadline=None, max_examples=50)
@given(items(), st.data())
def test_compiled_form_depends_on_nothing_but_the_items(drawn: Items, data: st.DataObject) -> None:
    first = drawn.build()
    second = drawn.build(data.draw(st.permutations(range(len(drawn.item_ids))), label="order"))
    assert first.version == second.version
    assert first.item_ids == second.item_ids
    for index, item_id in enumerate(first.item_ids):
        row = drawn.item_ids.index(item_id)
        assert first.index_of(item_id) == index
        assert first.semantic_id(index) == tuple(drawn.semantic_ids[row])
        assert first.popularity[index] == drawn.popularity[row]
        for name, values in drawn.attributes.items():
            assert first.attributes[name].value_of(index) == second.attributes[name].value_of(index)
            if not isinstance(values[row], list):
                assert first.attributes[name].value_of(index) in (values[row], [])
    key = [(first.semantic_id(i), -first.popularity[i], first.item_ids[i]) for i in range(first.item_count)]
    assert key == sorted(key)


def test_version_names_the_content() -> None:
    def version(
        item_ids: tuple[str, ...] = ("a", "b"),
        semantic_ids: tuple[tuple[int, ...], ...] = ((0, 1), (1, 1)),
        popularity: tuple[float, ...] | None = (1, 2),
        sizes: tuple[int, ...] | None = None,
        **attributes: list[object],
    ) -> str:
        return Catalog.build(item_ids, semantic_ids, popularity, attributes, sizes).version

    versions = [
        version(),
        version(item_ids=("a", "c")),
        version(item_ids=("ab", "b")),
        version(semantic_ids=((0, 1), (1, 0))),
        version(semantic_ids=((0, 1, 0), (1, 1, 0))),
        version(popularity=(1, 3)),
        version(popularity=None),
        version(shelf=["x", "y"]),
        version(shelf=["x", None]),
        version(shelf=[["x"], ["y"]]),
        version(rack=["x", "y"]),
        version(shelf=["xy", ""]),
        version(shelf=[1, 2]),
        version(shelf=["1", "2"]),
    ]
    assert len(set(versions)) == len(versions)
    assert all(len(name) == 16 and set(name) <= set("0123456789abcdef") for name in versions)
    assert version(sizes=(8, 8)) == version()  # codebook sizes belong to the model
    assert version(popularity=(0, 0)) == version(popularity=None)
    assert version(shelf=[3.0, None]) == version(shelf=[3, None])


def test_version_of_a_known_catalog(groceries: Catalog) -> None:
    """Fixed: a version must not change between releases for the same content."""
    assert groceries.version == "cf8b58ec00736226"


def test_amazon_industrial(amazon_industrial: Path) -> None:
    catalog = read_catalog(amazon_industrial)
    trie = catalog.trie
    assert catalog.item_count == 3686
    assert trie.node_counts == (48, 2295, 3670)
    assert np.diff(trie.item_offsets).max() == 3
    item = catalog.index_of("0")
    assert item is not None
    assert catalog.semantic_id(item) == (236, 231, 226)
    title = "SUPCO SPP6 Relay/Capacitor Hard Start Kit with 500% Increase Starting Torque"
    assert catalog.attributes["title"].value_of(item) == title
    assert (catalog.attributes["title"].codes >= 0).all()
    last = catalog.index_of("3685")
    assert last is not None
    assert catalog.semantic_id(last) == (223, 31, 2)
    assert all(size <= 256 for size in catalog.codebook_sizes)
    with_sizes = read_catalog(amazon_industrial, codebook_sizes=[256, 256, 256])
    assert with_sizes.codebook_sizes == (256, 256, 256)
    assert with_sizes.version == catalog.version
