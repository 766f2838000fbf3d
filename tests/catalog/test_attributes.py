"""Coded attribute columns: texts, kinds, lists, postings."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from loka_serve.catalog.attributes import AttributeBuilder, AttributeColumn, attribute_text
from loka_serve.catalog.catalog import Catalog
from loka_serve.errors import CatalogError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("PRODUCE", ("PRODUCE", "string")),
        ("", ("", "string")),
        (True, ("true", "boolean")),
        (False, ("false", "boolean")),
        (3, ("3", "number")),
        (3.0, ("3", "number")),
        (-0.0, ("0", "number")),
        (0.1, ("0.1", "number")),
        (1e300, ("1e+300", "number")),
        (np.int64(7), ("7", "number")),
        (np.bool_(True), ("true", "boolean")),
    ],
)
def test_text_of_a_value(value: object, expected: tuple[str, str]) -> None:
    assert attribute_text(value) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, {}, [1], datetime.date(2024, 1, 1), b"x"])
def test_what_no_attribute_is(value: object) -> None:
    with pytest.raises(ValueError, match="expected a string, a finite number, a boolean or a list of these, got"):
        attribute_text(value)


def column_of(*values: object) -> AttributeColumn:
    builder = AttributeBuilder("shelf")
    builder.extend(0, values[:2])
    builder.extend(2, values[2:])
    return builder.finish(len(values))


def test_single_values() -> None:
    column = column_of("b", None, "a", "b")
    assert column.values == ("a", "b")
    assert column.codes.tolist() == [1, -1, 0, 1]
    assert column.offsets is None
    assert column.code_of == {"a": 0, "b": 1}
    assert [column.value_of(item) for item in range(4)] == ["b", None, "a", "b"]
    postings, offsets = column.postings
    assert postings.tolist() == [2, 0, 3]
    assert offsets.tolist() == [0, 1, 3]
    assert [posting.tolist() for posting in column.items_with(["b", "zzz", "a", "b"])] == [[2], [0, 3]]


def test_lists() -> None:
    column = column_of(["x", "y", "x"], None, [], "z", ["z", "x"])
    assert column.values == ("x", "y", "z")
    assert column.codes.tolist() == [0, 1, 2, 2, 0]
    assert column.offsets is not None
    assert column.offsets.tolist() == [0, 2, 2, 2, 3, 5]
    assert [column.value_of(item) for item in range(5)] == [["x", "y"], [], [], ["z"], ["z", "x"]]
    assert [posting.tolist() for posting in column.items_with(["x", "z"])] == [[0, 4], [3, 4]]


def test_values_keep_their_kind() -> None:
    numbers = column_of(3.0, 2, 0.25, -1)
    assert numbers.kind == "number"
    values = [numbers.value_of(item) for item in range(4)]
    assert values == [3, 2, 0.25, -1]
    assert [type(value) for value in values] == [int, int, float, int]
    flags = column_of(True, False, None)
    assert [flags.value_of(item) for item in range(3)] == [True, False, None]
    mixed = column_of(1, "one", True)
    assert mixed.kind == "string"
    assert [mixed.value_of(item) for item in range(3)] == ["1", "one", "true"]


def test_nothing_but_missing_values() -> None:
    column = column_of(None, None)
    assert (column.values, column.codes.tolist(), column.kind) == ((), [-1, -1], "string")
    assert column.items_with(["a"]) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("a", None, "b"), ["b", "a", None]),
        ((["p", "q"], [], ["r"]), [["r"], ["p", "q"], []]),
    ],
)
def test_take(values: tuple[object, ...], expected: list[object]) -> None:
    taken = column_of(*values).take(np.array([2, 0, 1]))
    assert [taken.value_of(item) for item in range(3)] == expected


def test_half_a_surrogate_pair_is_no_text() -> None:
    builder = AttributeBuilder("shelf")
    builder.extend(0, ["\ud800"])
    with pytest.raises(CatalogError, match="shelf: expected valid Unicode text"):
        builder.finish(1)


def test_columns_of_a_catalog_follow_its_order(groceries: Catalog) -> None:
    price, tags = groceries.attributes["price"], groceries.attributes["tags"]
    assert [price.value_of(item) for item in range(7)] == [1, 2.5, 1.75, 3, 1, 2.5, None]
    assert [tags.value_of(item) for item in range(7)] == [
        ["cold"],
        ["vegan", "cold"],
        ["fresh", "cold"],
        ["fresh", "vegan"],
        ["fresh"],
        [],
        [],
    ]
