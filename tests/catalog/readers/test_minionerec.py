"""MiniOneRec items: index.json and info.txt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka_serve.catalog.readers import read_catalog
from loka_serve.errors import CatalogError

INDEX: dict[str, object] = {"0": ["<a_2>", "<b_0>"], "1": ["<a_0>", "<b_12>"], "B00X": ["<a_2>", "<b_0>"]}
INFO = ("<a_2><b_0>\tRelay\t0", "<a_0><b_12>\tStaples,\ttab inside\t1", "<a_2><b_0>\tRelay, blue\tB00X")


def write(tmp_path: Path, index: object = INDEX, info: tuple[str, ...] | None = INFO) -> Path:
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "index.json").write_text(text)
    if info is not None:
        (tmp_path / "info.txt").write_text("".join(line + "\n" for line in info))
    return tmp_path


def test_directory_and_index_give_the_same(tmp_path: Path) -> None:
    catalog = read_catalog(write(tmp_path))
    assert catalog.item_ids == ["1", "0", "B00X"]
    assert catalog.trie.semantic_ids().tolist() == [[0, 12], [2, 0]]
    assert catalog.codebook_sizes == (3, 13)
    titles = [catalog.attributes["title"].value_of(item) for item in range(3)]
    assert titles == ["Staples,\ttab inside", "Relay", "Relay, blue"]
    assert read_catalog(tmp_path / "index.json").version == catalog.version


def test_without_titles(tmp_path: Path) -> None:
    assert read_catalog(write(tmp_path, info=None)).attributes == {}
    some = read_catalog(write(tmp_path, info=INFO[:1]))
    assert [some.attributes["title"].value_of(item) for item in range(3)] == [None, "Relay", None]


def test_other_name_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "Office_Products.index.json"
    path.write_text(json.dumps(INDEX))
    assert read_catalog(path).item_ids == ["1", "0", "B00X"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({**INDEX, "1": ["<a_2>"]}, 'item "1": semantic_id: expected 2 levels, got 1'),
        ({**INDEX, "1": ["<a_2>", "b_0"]}, 'item "1": semantic_id: expected a token like "<a_12>" for level 1, got'),
        ({**INDEX, "1": ["<a_2>", 7]}, 'item "1": semantic_id: expected a token like "<a_12>" for level 1, got 7'),
        ({**INDEX, "1": ["<a_2>", "<b_-1>"]}, 'item "1": semantic_id: expected a token like "<a_12>" for level 1'),
        (
            {**INDEX, "1": ["<b_2>", "<a_0>"]},
            'item "1": semantic_id: expected the letters a, b, c, d, e in level order',
        ),
        ({**INDEX, "1": "<a_2><b_0>"}, 'item "1": semantic_id: expected a list of tokens'),
        (
            {**INDEX, "1": ["<a_2>", "<b_99999999999>"]},
            'item "1": semantic_id: level 1 has code 99999999999, expected 0',
        ),
        ({"0": [f"<{letter}_0>" for letter in "abcdef"]}, 'item "0": semantic_id: expected the letters'),
        ({"0": ["<a_0>"]}, 'item "0": semantic_id: expected 2 to 5 levels, got 1'),
        ({"": ["<a_0>", "<b_0>"]}, 'item "": item_id: expected a string'),
    ],
)
def test_bad_items(tmp_path: Path, index: dict[str, object], message: str) -> None:
    directory = write(tmp_path, index, info=None)
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(directory)
    assert str(caught.value).startswith(f"{directory / 'index.json'}, item ")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "index.json: expected a JSON object, got list"),
        ("{}", "index.json: expected at least one item, found none"),
        ("", "index.json: expected valid JSON"),
        ('{"0": ["<a_1>"', "index.json: expected valid JSON"),
        ('{"0": ["<a_1>", "<b_1>"], "0": ["<a_2>", "<b_1>"]}', 'index.json: .* key "0" is given twice in one object'),
        ('{"0": ' + "[" * 100_000, "index.json: expected valid JSON"),
    ],
)
def test_bad_index(tmp_path: Path, index: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, index, info=None))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("<a_0><b_12> no tabs", "line 2: expected SID, title and item between tabs"),
        ("<a_0><b_12>\tone tab", "line 2: expected SID, title and item between tabs"),
        ("<a_0><b_12>\tStaples\t9", 'line 2: item: expected an item of index.json, got "9"'),
        ("<a_0><b_11>\tStaples\t1", "line 2: SID: index.json has <a_0><b_12> for it, got <a_0><b_11>"),
        ("<a_2><b_0>\tRelay\t0", 'line 2: item: expected distinct items, "0" is there twice'),
    ],
)
def test_bad_info(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(CatalogError, match=f"info.txt, {message}"):
        read_catalog(write(tmp_path, info=(INFO[0], line)))


def test_codebook_size(tmp_path: Path) -> None:
    message = 'index.json, item "1": semantic_id: level 1 has code 12, expected less than the codebook size 12'
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path), codebook_sizes=[3, 12])


def test_directory_without_index(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="expected index.json in this directory"):
        read_catalog(tmp_path)
