"""Histories: the three formats, good and bad."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.histories import MISMATCH_AFTER, History, read_histories
from loka_serve.catalog.readers import read_catalog
from loka_serve.errors import CatalogError


def write(tmp_path: Path, name: str, *lines: str) -> Path:
    path = tmp_path / name
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_json_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "histories.jsonl",
        '{"user_id": "u1", "history": ["milk", 7], "target": ["bun"], "features": {"age": 30, "vip": true, "x": null}}',
        "",
        '{"user_id": 2, "history": [], "extra": "ignored"}',
    )
    assert list(read_histories(path)) == [
        History("u1", ["milk", "7"], ["bun"], {"age": "30", "vip": "true"}),
        History("2", [], [], {}),
    ]


def test_csv(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "test.csv",
        "user_id,history_item_title,item_title,history_item_id,item_id,history_item_sid,item_sid",
        "A1,\"['a', 'b, c']\",t,\"[3466, 2697]\",3681,\"['<a_1><b_2>']\",<a_1><b_3>",
        "A2,[],\"a title\nover two lines\",\"['x', 'y']\",z,[],s",
    )
    assert list(read_histories(path)) == [
        History("A1", ["3466", "2697"], ["3681"]),
        History("A2", ["x", "y"], ["z"]),
    ]


def test_sequences(tmp_path: Path) -> None:
    path = write(tmp_path, "sequences.txt", "1 10 11 12", "", "2\t20", "")
    assert list(read_histories(path)) == [History("1", ["10", "11"], ["12"]), History("2", [], ["20"])]


HEADER = "user_id,history_item_id,item_id"


def test_csv_of_a_long_history(tmp_path: Path) -> None:
    """A field beyond 128 KiB, the limit that Python's reader has by itself."""
    items = list(range(30_000))
    text = str(items)
    assert len(text) > 131_072
    history = next(read_histories(write(tmp_path, "h.csv", HEADER, f'u,"{text}",3')))
    assert history.items == [str(item) for item in items]


def test_json_lines_keep_large_integers_exact(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "h.jsonl",
        f'{{"user_id": {2**64}, "history": [{2**64 - 1}, {-(2**63) - 1}, {10**40 + 1}], "features": {{"n": {2**65}}}}}',
    )
    assert list(read_histories(path)) == [
        History(
            "18446744073709551616",
            ["18446744073709551615", "-9223372036854775809", f"1{'0' * 39}1"],
            features={"n": "36893488147419103232"},
        )
    ]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("h.jsonl", ['{"user_id": "u", "history": []}', "{"], "line 2: expected valid JSON, got"),
        ("h.jsonl", ["[1]"], "line 1: expected a JSON object, got list"),
        ("h.jsonl", ['{"history": []}'], "line 1: user_id: missing field"),
        ("h.jsonl", ['{"user_id": "u"}'], "line 1: history: missing field"),
        ("h.jsonl", ['{"user_id": null, "history": []}'], "line 1: user_id: expected an id: .*, got None"),
        ("h.jsonl", ['{"user_id": "u", "history": "milk"}'], "line 1: history: expected a list of ids, got str"),
        ("h.jsonl", ['{"user_id": "u", "history": [1.5]}'], "line 1: history: expected an id: .*, got 1.5"),
        ("h.jsonl", ['{"user_id": "u", "history": [], "target": "x"}'], "line 1: target: expected a list of ids"),
        ("h.jsonl", ['{"user_id": "u", "history": [], "features": [1]}'], "features: expected an object, got list"),
        ("h.jsonl", ['{"user_id": "u", "history": [], "features": {"a": [1]}}'], "features.a: expected a string"),
        ("h.jsonl", [], "expected at least one history, found none"),
        ("h.jsonl", ['{"user_id": "u", "history": ' + "[" * 100_000], "line 1: expected valid JSON"),
        ("h.csv", ["user_id,item_id", "u,1"], "line 1: history_item_id: missing column; .* user_id, item_id"),
        ("h.csv", [], "line 1: user_id: missing column; the columns are none"),
        ("h.csv", [HEADER], "expected at least one history, found none"),
        (
            "h.csv",
            [HEADER, 'u,"[1, 2]",3', 'u,"[1, 2",3'],
            r"line 3: history_item_id: expected a list .*, got '\[1, 2'",
        ),
        ("h.csv", [HEADER, 'u,"__import__(""os"")",3'], "line 2: history_item_id: expected a list as Python writes it"),
        (
            "h.csv",
            [HEADER, f'u,"[0x{"f" * 5000}]",3'],
            "line 2: history_item_id: expected an id, got an integer of 20000 bits",
        ),
        ("h.csv", [HEADER, "u,7,3"], "line 2: history_item_id: expected a list of ids, got int"),
        ("h.csv", [HEADER, 'u,"[1]",'], "line 2: item_id: expected an id: .*, got ''"),
        ("h.csv", [HEADER, 'u,"[1]"'], "line 2: expected 3 columns, got fewer"),
        ("h.csv", [HEADER, 'u,"[1]'], "line 2: expected CSV, got"),
        ("h.txt", ["1 2 3", "7"], "line 2: expected a user and at least one item, got '7'"),
        ("h.txt", [], "expected at least one history, found none"),
        ("h.xml", ["<x/>"], "expected a history file with one of the extensions .csv, .jsonl, .ndjson, .txt"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    path = write(tmp_path, name, *lines)
    with pytest.raises(CatalogError, match=message) as caught:
        list(read_histories(path))
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["h.jsonl", "h.csv", "h.txt"])
def test_bytes_that_are_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(HEADER.encode() + b"\n\xff\xfe 1 2\n" if name == "h.csv" else b"\xff\xfe 1 2\n")
    with pytest.raises(CatalogError, match=rf"{name}, line {2 if name == 'h.csv' else 1}: expected UTF-8 text"):
        list(read_histories(path))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no such file"):
        read_histories(tmp_path / "nothing.csv")


def test_reading_is_lazy(tmp_path: Path) -> None:
    """The first history comes although a later line is bad."""
    path = write(tmp_path, "h.jsonl", '{"user_id": "u", "history": ["milk"]}', "not json")
    histories = read_histories(path)
    assert isinstance(histories, Iterator)
    assert next(histories).items == ["milk"]
    with pytest.raises(CatalogError, match="line 2"):
        next(histories)


def test_items_that_the_catalog_does_not_know(tmp_path: Path, groceries: Catalog) -> None:
    """Single unknown items stay; a file without any known one is of another catalog."""
    some = write(tmp_path, "some.txt", "1 caviar", "2 milk caviar")
    assert [history.items + history.target for history in read_histories(some, groceries)] == [
        ["caviar"],
        ["milk", "caviar"],
    ]
    none = write(tmp_path, "none.txt", "1 caviar truffle", "2 truffle")
    with pytest.raises(CatalogError, match="expected items of the catalog, the first 2 histories hold none of them"):
        list(read_histories(none, groceries))
    many = write(tmp_path, "many.txt", *["1 caviar"] * (MISMATCH_AFTER + 5), "2 milk")
    with pytest.raises(CatalogError, match=f"the first {MISMATCH_AFTER} histories hold none of them"):
        list(read_histories(many, groceries))


def test_amazon_industrial(amazon_industrial: Path) -> None:
    catalog = read_catalog(amazon_industrial)
    test = list(read_histories(amazon_industrial / "test.csv", catalog))
    assert len(test) == 4533
    assert len(list(read_histories(amazon_industrial / "valid.csv", catalog))) == 4532
    assert test[0].user_id == "A6948"
    assert test[0].items == ["3466", "2697", "3557", "2660", "2507", "2152", "3453", "1888", "2544", "3669"]
    assert test[0].target == ["3681"]
    assert all(catalog.index_of(item) is not None for history in test for item in (*history.items, *history.target))


def test_beauty(beauty_sequences: Path) -> None:
    first = list(islice(read_histories(beauty_sequences), 3))
    assert first == [
        History("1", ["1", "2", "3", "4", "5", "6", "7"], ["8"]),
        History("2", [str(item) for item in range(9, 20)], ["20"]),
        History("3", [str(item) for item in range(21, 29)], ["29"]),
    ]
    histories = list(read_histories(beauty_sequences))
    assert len(histories) == 22363
    items = [item for history in histories for item in (*history.items, *history.target)]
    assert len(items) == 194687
    assert len(set(items)) == 12101


def test_histories_round_trip_through_json_lines(tmp_path: Path) -> None:
    history = History("u", ["a", "b"], ["c"], {"age": "30"})
    row = {
        "user_id": history.user_id,
        "history": history.items,
        "target": history.target,
        "features": history.features,
    }
    assert list(read_histories(write(tmp_path, "h.jsonl", json.dumps(row)))) == [history]
