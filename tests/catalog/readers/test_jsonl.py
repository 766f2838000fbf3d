"""JSON Lines items: good and bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka_serve.catalog.readers import read_catalog
from loka_serve.errors import CatalogError

MILK = {"item_id": "milk", "semantic_id": [0, 1, 0], "popularity": 9, "department": "dairy", "tags": ["cold", "fresh"]}
BUN = {"item_id": 17, "semantic_id": [0, 3, 1], "price": 0.5}


def write(tmp_path: Path, *lines: object, name: str = "items.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_good_file(tmp_path: Path) -> None:
    catalog = read_catalog(write(tmp_path, BUN, "", MILK))
    assert catalog.item_ids == ["milk", "17"]
    assert catalog.codebook_sizes == (1, 4, 2)
    assert catalog.popularity.tolist() == [9, 0]
    assert list(catalog.attributes) == ["department", "price", "tags"]
    assert [catalog.attributes["department"].value_of(item) for item in range(2)] == ["dairy", None]
    assert [catalog.attributes["price"].value_of(item) for item in range(2)] == [None, 0.5]
    assert [catalog.attributes["tags"].value_of(item) for item in range(2)] == [["cold", "fresh"], []]


@pytest.mark.parametrize("name", ["items.jsonl", "items.ndjson", "items.json", "items"])
def test_recognised_by_extension_or_content(tmp_path: Path, name: str) -> None:
    assert read_catalog(write(tmp_path, MILK, BUN, name=name)).item_ids == ["milk", "17"]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(MILK).encode() + b"\r\n" + json.dumps(BUN).encode() + b"\r\n")
    assert read_catalog(path).version == read_catalog(write(tmp_path, MILK, BUN)).version


def test_levels_and_codebook_sizes_given(tmp_path: Path) -> None:
    path = write(tmp_path, MILK, BUN)
    assert read_catalog(path, codebook_sizes=[8, 8, 8], levels=3).codebook_sizes == (8, 8, 8)
    with pytest.raises(CatalogError, match="line 1: semantic_id: expected 4 levels, got 3"):
        read_catalog(path, levels=4)
    with pytest.raises(CatalogError, match="codebook_sizes: expected 3 sizes, one for each level, got 2"):
        read_catalog(path, codebook_sizes=[8, 8], levels=3)
    with pytest.raises(CatalogError, match="expected 2 to 5 levels, got 6"):
        read_catalog(path, levels=6)
    message = "line 2: semantic_id: level 1 has code 3, expected less than the codebook size 3"
    with pytest.raises(CatalogError, match=message):
        read_catalog(path, codebook_sizes=[8, 3, 8])


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, 2**64 + 1, -(2**63) - 1, 10**100 + 1])
def test_integers_stay_exact_however_large(tmp_path: Path, number: int) -> None:
    """Beyond 64 bits, where a fast parser makes them floats that lose their last digits."""
    path = write(tmp_path, {**BUN, "item_id": number, "popularity": number % 2**100, "ean": number, "eans": [number]})
    catalog = read_catalog(path)
    assert catalog.item_ids == [str(number)]
    assert catalog.popularity.tolist() == [pytest.approx(float(number % 2**100))]
    assert catalog.attributes["ean"].values == (str(number),)
    assert catalog.attributes["ean"].value_of(0) == number and catalog.attributes["eans"].value_of(0) == [number]


def test_long_digits_in_texts_and_fractions_stay_what_they_are(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"item_id": "00000000000000000000012", "semantic_id": [0, 0], "x": 0.12345678901234567890123}'
    )
    catalog = read_catalog(path)
    assert catalog.item_ids == ["00000000000000000000012"]
    assert catalog.attributes["x"].value_of(0) == 0.12345678901234568


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected valid JSON, got"),
        ('{"item_id": "b", "semantic_id": [0, 0, 0]} trailing', "expected valid JSON, got"),
        ('{"item_id": ' + "[" * 100_000, "expected valid JSON, got"),
        ("7", "expected a JSON object, got int"),
        ({"semantic_id": [0, 0, 0]}, "item_id: missing field"),
        ({"item_id": "b"}, "semantic_id: missing field"),
        ({**BUN, "item_id": "milk"}, 'item_id: expected distinct ids, "milk" is already at line 1'),
        ({**BUN, "item_id": None}, "item_id: expected a string"),
        ({**BUN, "item_id": 1.5}, "item_id: expected a string"),
        ('{"item_id": "\\ud800", "semantic_id": [0, 0, 0]}', "item_id: expected a string"),
        ({**BUN, "semantic_id": [0, 3]}, "semantic_id: expected 3 levels, got 2"),
        ({**BUN, "semantic_id": [0, 3, -1]}, "semantic_id: level 2 has code -1, expected 0"),
        ({**BUN, "semantic_id": [0, 3, 2**31]}, "semantic_id: level 2 has code 2147483648, expected 0"),
        ({**BUN, "semantic_id": [0, "3", 1]}, "semantic_id: expected an integer as code of level 1, got '3'"),
        (
            '{"item_id": "b", "semantic_id": [0, 36893488147419103233, 0]}',
            "semantic_id: level 1 has code 36893488147419103233, expected 0",
        ),
        # More digits than Python reads: like a number beyond all floats.
        (f'{{"item_id": {"9" * 5000}, "semantic_id": [0, 0, 0]}}', "item_id: expected a string .*, got inf"),
        (f'{{"item_id": "b", "semantic_id": [0, 0, 0], "n": -{"9" * 5000}}}', "n: expected a string, .*, got -inf"),
        ({**BUN, "popularity": 10**300}, "popularity: expected a finite number, got 1000"),
        ({**BUN, "semantic_id": {"a": 1}}, "semantic_id: expected a list of integers"),
        ({**BUN, "popularity": float("nan")}, "popularity: expected a finite number, got nan"),
        ({**BUN, "popularity": float("-inf")}, "popularity: expected a finite number, got -inf"),
        ({**BUN, "popularity": "9"}, "popularity: expected a finite number, got '9'"),
        (
            {**BUN, "size": {"cm": 3}},
            "size: expected a string, a finite number, a boolean or a list of these, got dict",
        ),
        ({**BUN, "size": float("nan")}, "size: expected a string, .*, got nan"),
        ({**BUN, "size": ["s", ["m"]]}, "size: expected a string, .*, got list"),
        ('{"item_id": "b", "semantic_id": [0, 0, 0], "\\ud800": 1}', "expected valid Unicode text as the name"),
    ],
)
def test_bad_lines(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, MILK, "", line)
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")


def test_attribute_text_that_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, MILK, '{"item_id": "b", "semantic_id": [0, 0, 0], "department": "\\ud800"}')
    with pytest.raises(CatalogError, match="items.jsonl: department: expected valid Unicode text"):
        read_catalog(path)


def test_first_line_sets_the_levels(tmp_path: Path) -> None:
    path = write(tmp_path, {**MILK, "semantic_id": [7]})
    with pytest.raises(CatalogError, match="line 1: semantic_id: expected 2 to 5 levels, got 1"):
        read_catalog(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(json.dumps(MILK).encode() + b'\n{"item_id": "caf\xe9", "semantic_id": [0, 0, 0]}\n')
    with pytest.raises(CatalogError, match="items.jsonl, line 2: expected UTF-8 text"):
        read_catalog(path)


@pytest.mark.parametrize(
    ("content", "message"), [("", "the file is empty"), ("\n \n", "at least one item, found none")]
)
def test_empty_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(content)
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(path)
    assert str(caught.value).startswith(f"{path}: ")
