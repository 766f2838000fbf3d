"""Filters: hand-checked ones, and masks against the definition item by item."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.filters import CatalogFilter
from loka_serve.errors import RequestError
from tests.catalog.strategies import DEPARTMENTS, TAGS, Items, items


def masks(catalog_filter: CatalogFilter | None) -> list[list[int]]:
    """Allowed items and allowed nodes of each level, as 0 and 1."""
    assert catalog_filter is not None
    rows = (catalog_filter.allowed_items, *catalog_filter.allowed_nodes)
    assert {row.dtype for row in rows} == {np.dtype(np.bool_)}
    return [row.astype(int).tolist() for row in rows]


def test_nothing_to_leave_out(groceries: Catalog) -> None:
    assert groceries.filter() is None
    assert groceries.filter([], {}) is None
    assert groceries.filter((), {"organic": ["true", "false"]}) is not None  # the gift card has no such attribute
    everything = Catalog.build(["a", "b"], [[0, 0], [0, 1]], attributes={"shelf": ["x", "y"]})
    assert everything.filter((), {"shelf": ["x", "y", "z"]}) is None


def test_exclusions(groceries: Catalog) -> None:
    """Milk alone leaves its SID to oat milk; soap and gift card empty the whole right half."""
    excluded = groceries.filter([0])
    assert masks(excluded) == [[0, 1, 1, 1, 1, 1, 1], [1, 1], [1, 1, 1], [1, 1, 1, 1, 1]]
    excluded = groceries.filter([6, 0, 5, 5])
    assert masks(excluded) == [[0, 1, 1, 1, 1, 0, 0], [1, 0], [1, 1, 0], [1, 1, 1, 0, 0]]
    assert excluded is not None
    assert excluded.legal_leaves == 3
    excluded = groceries.filter(np.array([0, 1, 2]))
    assert masks(excluded) == [[0, 0, 0, 1, 1, 1, 1], [1, 1], [0, 1, 1], [0, 0, 1, 1, 1]]


def test_predicates(groceries: Catalog) -> None:
    dairy = groceries.filter((), {"department": ["dairy"]})
    assert masks(dairy) == [[1, 1, 1, 0, 0, 0, 0], [1, 0], [1, 0, 0], [1, 1, 0, 0, 0]]
    assert dairy is not None
    assert dairy.legal_leaves == 2
    either = groceries.filter((), {"department": ["dairy", "household"]})
    assert masks(either)[0] == [1, 1, 1, 0, 0, 1, 0]
    both = groceries.filter((), {"department": ["dairy", "bakery"], "organic": [True]})
    assert masks(both) == [[0, 1, 1, 1, 0, 0, 0], [1, 0], [1, 1, 0], [1, 1, 1, 0, 0]]
    assert masks(groceries.filter((), {"tags": ["vegan", "fresh"]}))[0] == [0, 1, 1, 1, 1, 0, 0]
    assert masks(groceries.filter((), {"price": [1.0, "1.75"]}))[0] == [1, 0, 1, 0, 1, 0, 0]
    assert masks(groceries.filter([1, 3], {"organic": ["true"]}))[0] == [0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("exclude", "predicates"),
    [
        (range(7), {}),
        ((), {"department": ["frozen"]}),
        ((), {"department": []}),
        ((), {"department": ["household"], "organic": [True]}),
        ([5], {"department": ["household"]}),
    ],
)
def test_an_empty_allowed_set_is_valid(
    groceries: Catalog, exclude: range | list[int], predicates: dict[str, list[object]]
) -> None:
    nothing = groceries.filter(exclude, predicates)  # type: ignore[arg-type]
    assert nothing is not None
    assert nothing.legal_leaves == 0
    assert not any(map(sum, masks(nothing)))


@pytest.mark.parametrize(
    ("exclude", "predicates", "field", "message"),
    [
        ((), {"color": ["red"]}, "filter.color", "known attributes: department, organic, price, tags"),
        ((), {"department": "dairy"}, "filter.department", "expected a list of values, got str"),
        ((), {"department": [None]}, "filter.department", "expected a string, a finite number, a boolean"),
        ((), {"price": [float("nan")]}, "filter.price", "got nan"),
        ([7], {}, "exclude", r"expected item indices in 0\.\.6, got 7\.\.7"),
        ([-1, 2], {}, "exclude", r"expected item indices in 0\.\.6, got -1\.\.2"),
        (np.ones(7, np.bool_), {}, "exclude", "expected integer item indices, got bool"),
    ],
)
def test_bad_requests(
    groceries: Catalog, exclude: list[int], predicates: dict[str, list[str]], field: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        groceries.filter(exclude, predicates)
    assert caught.value.field == field


def test_catalog_without_attributes() -> None:
    with pytest.raises(RequestError, match="known attributes: none"):
        Catalog.build(["a"], [[0, 0]]).filter((), {"shelf": ["x"]})


def assert_masks_match(catalog: Catalog, got: CatalogFilter | None, allowed: set[int]) -> None:
    """The definition: a node is allowed iff an allowed item is below it."""
    if len(allowed) == catalog.item_count:
        assert got is None
        return
    assert got is not None
    assert set(np.flatnonzero(got.allowed_items).tolist()) == allowed
    allowed_ids = {catalog.semantic_id(index) for index in allowed}
    for level, mask in enumerate(got.allowed_nodes):
        prefixes = sorted({tuple(codes[: level + 1]) for codes in catalog.trie.semantic_ids().tolist()})
        allowed_prefixes = {codes[: level + 1] for codes in allowed_ids}
        assert mask.tolist() == [prefix in allowed_prefixes for prefix in prefixes]
    assert got.legal_leaves == len(allowed_ids)


@settings(deadline=None, max_examples=50)
@given(items(), st.data())
def test_masks_equal_their_definition(drawn: Items, data: st.DataObject) -> None:
    catalog = drawn.build()
    exclude = data.draw(st.lists(st.integers(0, catalog.item_count - 1), max_size=catalog.item_count), label="exclude")
    values: dict[str, st.SearchStrategy[list[Any]]] = {
        "department": st.lists(st.sampled_from((*DEPARTMENTS, "none has this"))),
        "tags": st.lists(st.sampled_from(TAGS)),
        "organic": st.lists(st.booleans()),
    }
    predicates = data.draw(st.fixed_dictionaries({}, optional=values), label="predicates")

    def matches(index: int) -> bool:
        row = drawn.item_ids.index(catalog.item_ids[index])
        for name, wanted in predicates.items():
            value = drawn.attributes[name][row]
            has = value if isinstance(value, list) else [value]
            if not set(has) & set(wanted):
                return False
        return index not in exclude

    allowed = {index for index in range(catalog.item_count) if matches(index)}
    assert_masks_match(catalog, catalog.filter(exclude, predicates), allowed)


def test_sparse_and_dense_ways_up_agree() -> None:
    """The number of allowed items decides how masks are propagated; both must fit the definition."""
    generator = np.random.default_rng(0)
    semantic_ids = generator.integers(0, [5, 20, 20], size=(2000, 3))
    shelf = generator.integers(0, 50, size=2000)
    catalog = Catalog.build(range(2000), semantic_ids, attributes={"shelf": shelf.tolist()})
    for wanted in ([0], list(range(45))):
        allowed = {
            index
            for index in range(catalog.item_count)
            if catalog.attributes["shelf"].value_of(index) in wanted and index % 7 != 0
        }
        assert_masks_match(catalog, catalog.filter(range(0, 2000, 7), {"shelf": wanted}), allowed)
