"""OpenOneRec sid2pid JSON: packed and dotted keys, one SID to many items."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_serve.catalog.readers import read_catalog
from loka_serve.catalog.readers.openonerec import pack_semantic_id, unpack_semantic_id
from loka_serve.errors import CatalogError


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "sid2pid.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# 1 * 8192^2 + 2 * 8192 + 3 and 8191 * 8192^2 + 8191 * 8192 + 8191, by hand.
PACKED = {"67125251": [{"pid": 501, "count": 4}, {"pid": 500, "count": 9}], "549755813887": [{"iid": "x"}]}


def test_packed_keys(tmp_path: Path) -> None:
    catalog = read_catalog(write(tmp_path, PACKED))
    assert catalog.item_ids == ["500", "501", "x"]
    assert catalog.trie.semantic_ids().tolist() == [[1, 2, 3], [8191, 8191, 8191]]
    assert catalog.trie.item_offsets.tolist() == [0, 2, 3]
    assert catalog.popularity.tolist() == [9, 4, 0]
    assert catalog.codebook_sizes == (8192, 8192, 8192)


def test_dotted_keys_and_bare_ids(tmp_path: Path) -> None:
    dotted = {"1.2.3": [501, "500"], "8191.8191.8191": "x"}
    catalog = read_catalog(write(tmp_path, dotted))
    assert catalog.item_ids == ["500", "501", "x"]
    assert catalog.trie.semantic_ids().tolist() == [[1, 2, 3], [8191, 8191, 8191]]
    assert read_catalog(write(tmp_path, {"9000.1": [1]})).semantic_id(0) == (9000, 1)


def test_further_fields_are_attributes(tmp_path: Path) -> None:
    entry = {"pid": 5, "count": 2, "count_after_downsample": 1, "category": "video"}
    catalog = read_catalog(write(tmp_path, {"0": [entry]}))
    assert list(catalog.attributes) == ["category"]
    assert catalog.attributes["category"].value_of(0) == "video"


def test_other_numbers_of_levels(tmp_path: Path) -> None:
    path = write(tmp_path, {str(8192**3 * 7 + 5): [1]})
    assert read_catalog(path, levels=4).semantic_id(0) == (7, 0, 0, 5)
    assert read_catalog(path, codebook_sizes=[8192] * 5).semantic_id(0) == (0, 7, 0, 0, 5)
    with pytest.raises(CatalogError, match=r"expected a packed key below 8192\^3 \(3 levels\), got 3848290697221"):
        read_catalog(path)


@given(st.integers(2, 5).flatmap(lambda levels: st.lists(st.integers(0, 8191), min_size=levels, max_size=levels)))
def test_unpacking_inverts_packing(codes: list[int]) -> None:
    assert unpack_semantic_id(pack_semantic_id(codes), len(codes)) == codes


def test_packing_a_code_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"codes in 0\.\.8191, got 8192"):
        pack_semantic_id([0, 8192, 0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"abc": [1]}, "key \"abc\": semantic_id: expected a packed integer or codes joined by dots, got 'abc'"),
        ({"-1": [1]}, 'key "-1": semantic_id: expected a packed integer'),
        ({str(8192**3): [1]}, r"semantic_id: expected a packed key below 8192\^3"),
        ({"9" * 5000: [1]}, "semantic_id: expected a packed integer"),
        ({"1.2.x": [1]}, 'key "1.2.x": semantic_id: expected codes joined by dots'),
        ({"1..2": [1]}, 'key "1..2": semantic_id: expected codes joined by dots'),
        ({"1.2.3.4.5.6": [1]}, 'key "1.2.3.4.5.6": semantic_id: expected 2 to 5 levels, got 6'),
        ({"1.2.3": [1], "1.2": [2]}, 'key "1.2": semantic_id: expected 3 levels, got 2'),
        ({"1.2.9999999999": [1]}, 'key "1.2.9999999999": semantic_id: level 2 has code 9999999999, expected 0'),
        ({"5": []}, 'key "5": pid: expected at least one item, got an empty list'),
        ({"5": [{"id": 1}]}, 'key "5": pid: missing field, expected one of pid, iid'),
        ({"5": [None]}, 'key "5": item_id: expected a string'),
        ({"5": [1], "6": [1]}, 'key "6": item_id: expected distinct ids, "1" is already at key 5'),
        ({"5": [{"pid": 1, "count": "9"}]}, 'key "5": popularity: expected a finite number'),
        ('{"5": [{"pid": 1, "count": NaN}]}', 'key "5": popularity: expected a finite number, got nan'),
        ('{"5": [1], "5": [2]}', 'expected valid JSON, got: key "5" is given twice in one object'),
        ("{", "expected valid JSON"),
        ("{}", "expected at least one item, found none"),
    ],
)
def test_bad_files(tmp_path: Path, content: object, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(path)
    assert str(caught.value).startswith(str(path))
