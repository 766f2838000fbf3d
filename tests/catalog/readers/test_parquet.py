"""Parquet items: the same content as JSON Lines gives the same catalog."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loka_serve.catalog.readers import parquet, read_catalog
from loka_serve.errors import CatalogError

pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow, the extra `parquet`")
pyarrow_parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow, the extra `parquet`")

COLUMNS: dict[str, list[Any]] = {
    "item_id": ["milk", "bun", "soap"],
    "semantic_id": [[0, 1], [0, 3], [2, 0]],
    "popularity": [9.0, None, 0.5],
    "department": ["dairy", "bakery", None],
    "price": [1, 2, 3],
    "organic": [True, None, False],
    "tags": [["cold", "fresh"], None, []],
}


def write(tmp_path: Path, columns: dict[str, Any], name: str = "items.parquet") -> Path:
    path = tmp_path / name
    pyarrow_parquet.write_table(pyarrow.table(columns), path)
    return path


def test_same_catalog_as_from_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*COLUMNS.values(), strict=True)]
    lines = tmp_path / "items.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    expected = read_catalog(lines)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 2)  # more than one batch
    catalog = read_catalog(write(tmp_path, COLUMNS))
    assert catalog.version == expected.version
    assert catalog.item_ids == expected.item_ids == ["milk", "bun", "soap"]
    assert [catalog.attributes["price"].value_of(item) for item in range(3)] == [1, 2, 3]
    assert [catalog.attributes["organic"].value_of(item) for item in range(3)] == [True, None, False]


def test_column_types(tmp_path: Path) -> None:
    """Integer ids, fixed-size lists, small integers, dictionary-coded strings, floats that are whole numbers."""
    typed = {
        "item_id": pyarrow.array([1, 2], pyarrow.int64()),
        "semantic_id": pyarrow.array([[0, 1], [0, 3]], pyarrow.list_(pyarrow.uint16(), 2)),
        "department": pyarrow.array(["a", "b"]).dictionary_encode(),
        "price": pyarrow.array([3.0, None], pyarrow.float32()),
    }
    plain = {"item_id": ["1", "2"], "semantic_id": [[0, 1], [0, 3]], "department": ["a", "b"], "price": [3, None]}
    assert read_catalog(write(tmp_path, typed)).version == read_catalog(write(tmp_path, plain, "b.parquet")).version


def test_recognised_by_content(tmp_path: Path) -> None:
    assert read_catalog(write(tmp_path, COLUMNS, "items.bin")).item_count == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"semantic_id": [[0, 1], [0, 1, 2], [2, 0]]}, "row 1: semantic_id: expected 2 levels, got 3"),
        ({"semantic_id": [[0, 1], None, [2, 0]]}, "row 1: semantic_id: expected a list of integers, got None"),
        ({"semantic_id": [[0, 1], [0, None], [2, 0]]}, "row 1: semantic_id: expected an integer as code of level 1"),
        ({"semantic_id": [[0, 1], [0, 0.5], [2, 0]]}, "row 0: semantic_id: expected an integer as code of level 0"),
        ({"semantic_id": [[0, 1], [0, -3], [2, 0]]}, "row 1: semantic_id: level 1 has code -3"),
        ({"item_id": ["milk", "bun", "milk"]}, 'row 2: item_id: expected distinct ids, "milk" is already at row 0'),
        ({"item_id": ["milk", None, "soap"]}, "row 1: item_id: expected a string"),
        ({"popularity": [1.0, float("nan"), 2.0]}, "row 1: popularity: expected a finite number, got nan"),
        ({"price": [{"a": 1}, None, None]}, "row 0: price: expected a string, .*, got dict"),
    ],
)
def test_bad_rows(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, {**COLUMNS, **changes})
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(path)
    assert str(caught.value).startswith(f"{path}, row ")


@pytest.mark.parametrize("field", ["item_id", "semantic_id"])
def test_missing_column(tmp_path: Path, field: str) -> None:
    path = write(tmp_path, {name: values for name, values in COLUMNS.items() if name != field})
    with pytest.raises(CatalogError, match=f"items.parquet: {field}: missing column; the columns are .*popularity"):
        read_catalog(path)


def test_column_given_twice(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], [[0, 0]], ["x"], ["y"]], names=["item_id", "semantic_id", "shelf", "shelf"])
    path = tmp_path / "items.parquet"
    pyarrow_parquet.write_table(table, path)
    with pytest.raises(CatalogError, match="expected distinct column names"):
        read_catalog(path)


def test_no_rows(tmp_path: Path) -> None:
    empty = pyarrow.table(COLUMNS).slice(0, 0)
    path = tmp_path / "items.parquet"
    pyarrow_parquet.write_table(empty, path)
    with pytest.raises(CatalogError, match="items.parquet: expected at least one item, found none"):
        read_catalog(path)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, COLUMNS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CatalogError, match="items.parquet: expected a Parquet file, got"):
        read_catalog(path)


def test_damaged_pages(tmp_path: Path) -> None:
    path = write(tmp_path, COLUMNS)
    data = bytearray(path.read_bytes())
    data[4:40] = b"\xff" * 36
    path.write_bytes(bytes(data))
    with pytest.raises(CatalogError, match="items.parquet: expected a Parquet file, got"):
        read_catalog(path)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, COLUMNS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CatalogError, match=r"reading Parquet needs pyarrow; install loka-serve\[parquet\]"):
        read_catalog(path)
