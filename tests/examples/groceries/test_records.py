"""Damaged training.json and results.json: refused by name, before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.groceries import evaluate, spot_check
from examples.groceries.evaluate import CHECKPOINT, RESULTS
from examples.groceries.purchases import GroceriesError
from examples.groceries.records import Committed, check_version, read_earlier, read_list
from loka_serve.command_line import run_command_line
from tests.examples.groceries.data import synthetic_sequences

NO_OBJECTS = [b"", b"{", b"[]", b"3", b"null", b"[" * 100_000, b"\xff"]


def test_the_committed_results_are_read() -> None:
    held = json.loads(RESULTS.read_text())
    committed = Committed.read(RESULTS)
    assert committed.checkpoint == held["environment"]["checkpoint"] and committed.beam == 64
    assert (committed.product_number, committed.random) == (
        held["ours"]["hr@10"],
        held["ours"]["random_order"]["hr@10"],
    )


@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_file_that_holds_no_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    for name in ("results.json", "training.json"):
        (tmp_path / name).write_bytes(content)
    for read in (Committed.read, read_earlier):
        with pytest.raises(GroceriesError, match=r"results\.json: expected an object in JSON"):
            read(tmp_path / "results.json")
    with pytest.raises(GroceriesError, match=r"training\.json: expected an object in JSON"):
        check_version(tmp_path, synthetic_sequences())
    if content != b"[]":
        with pytest.raises(GroceriesError, match=r"results\.json: expected a list of objects in JSON"):
            read_list(tmp_path / "results.json")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("environment", None),
        ("environment.checkpoint", 3),
        ("environment.beam_width", "64"),
        ("environment.beam_width", 0),
        ("environment.beam_width", True),
        ("ours", []),
        ("ours.hr@10", "0.2"),
        ("ours.hr@10", float("nan")),
        ("ours.random_order", 0.1),
        ("ours.random_order.hr@10", 2.0),
    ],
)
def test_damaged_results_are_refused_by_field(tmp_path: Path, keys: str, value: object) -> None:
    results: Any = json.loads(RESULTS.read_text())
    entry = results
    *parents, last = keys.split(".")
    for key in parents:
        entry = entry[key]
    entry[last] = value
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(GroceriesError, match=rf"results\.json: {keys}.*: expected "):
        Committed.read(tmp_path / "results.json")


def test_earlier_results_may_be_missing(tmp_path: Path) -> None:
    assert read_earlier(tmp_path / "results.json") == {}
    (tmp_path / "results.json").write_text('{"environment": 3}')
    with pytest.raises(GroceriesError, match="environment: expected an object, got 3"):
        read_earlier(tmp_path / "results.json")


def run(module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error of a command that is to end with exit code 2 and one line."""
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        run_command_line(module.main)
    output, error = capsys.readouterr()
    assert caught.value.code == 2 and error.count("\n") == 1 and not output
    return error


def test_the_commands_say_so_before_they_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: object, **options: object) -> None:
        raise AssertionError("measured all the same")

    for module in (evaluate, spot_check):
        monkeypatch.setattr(module, "recommend_part", measured)
    monkeypatch.setattr(evaluate, "load_sequences", lambda data: synthetic_sequences())
    monkeypatch.setattr(evaluate, "check_version", lambda checkpoint, sequences: {"best": {"epoch": 1}})
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"environment": ')
    data = ("--data", tmp_path)
    for module, flag in ((spot_check, "--results"), (evaluate, "--out")):
        error = run(module, monkeypatch, capsys, *data, flag, damaged)
        assert error.startswith(f"error: {damaged}: expected an object in JSON: ")
    error = run(evaluate, monkeypatch, capsys, *data, "--out", tmp_path)
    assert error.startswith(
        f"error: argument --out: expected a file that can be written, got '{tmp_path}': it is a folder"
    )
    error = run(evaluate, monkeypatch, capsys, *data, "--out", damaged / "results.json")
    assert f"{damaged} is no folder" in error
    out = ("--out", tmp_path / "new.json")
    error = run(evaluate, monkeypatch, capsys, *data, *out, "--bundle", tmp_path / "nowhere")
    assert "nowhere" in error
    assert CHECKPOINT.exists() and not (tmp_path / "new.json").exists()
