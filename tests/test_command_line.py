"""Arguments and errors of the commands of examples and benchmarks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loka_serve.command_line import (
    CommandParser,
    duration,
    existing_file,
    not_negative,
    output_file,
    positive,
    run_command_line,
    usable_device,
    zero_or_one,
)
from loka_serve.errors import LokaError


@pytest.mark.parametrize(
    ("kind", "good", "value"),
    [(positive, "3", 3), (not_negative, "0", 0), (zero_or_one, "1", 1), (duration, "0.5", 0.5)],
)
def test_what_is_right_is_read(kind: Callable[[str], Any], good: str, value: float) -> None:
    assert kind(good) == value


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (positive, "0"),
        (positive, "1.5"),
        (not_negative, "-1"),
        (zero_or_one, "2"),
        (zero_or_one, "x"),
        (duration, "0"),
        (duration, "nan"),
        (duration, "inf"),
        (existing_file, "nowhere"),
        (output_file, ""),
    ],  # fmt: skip
)
def test_what_is_wrong_is_said(kind: Callable[[str], Any], bad: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{bad}'"):
        kind(bad)


def test_a_device_that_is_not_here_is_named() -> None:
    assert usable_device("cpu") == "cpu"
    with pytest.raises(argparse.ArgumentTypeError, match="'cuda:99' is not usable here"):
        usable_device("cuda:99")


def test_errors_end_a_command_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        (tmp_path / "missing").read_text()

    def wrong() -> None:
        raise LokaError("as told")

    def nameless() -> None:
        raise FileNotFoundError("script: expected a file")

    for main, message in (
        (missing, f"{tmp_path / 'missing'}: No such file or directory"),
        (wrong, "as told"),
        (nameless, "script: expected a file"),
    ):
        with pytest.raises(SystemExit) as caught:
            run_command_line(main)
        assert caught.value.code == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    run_command_line(lambda: None)


def test_a_wrong_argument_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("What it does.")
    parser.add_argument("--rows", type=positive)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--rows", "0"])
    assert caught.value.code == 2
    message = "error: argument --rows: expected a whole number from 1, got '0' (see --help)\n"
    assert capsys.readouterr().err == message


def test_a_file_that_can_be_written_is_told_from_one_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("kept")
    for good in ("file", "new", "new/folders/file"):
        assert output_file(str(tmp_path / good)) == tmp_path / good
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"
    monkeypatch.chdir(tmp_path)
    assert output_file("new.json") == Path("new.json")
    with pytest.raises(argparse.ArgumentTypeError, match="it is a folder"):
        output_file(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match=r"file is no folder$"):
        output_file(str(tmp_path / "file" / "results" / "file"))


def test_permissions_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user whom the folder, or the file, is closed to; who runs the tests may be allowed everything."""
    (tmp_path / "file").write_text("")
    for closed, message in ((tmp_path, "may not be written to"), (tmp_path / "file", "it may not be written")):
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: Path(path) != closed)
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            output_file(str(tmp_path / "file"))
