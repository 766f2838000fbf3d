"""Arguments and errors of the example's commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.groceries.command_line import duration, not_negative, positive, run_command_line, usable_device
from examples.groceries.prepare import load_sequences
from examples.groceries.purchases import GroceriesError


@pytest.mark.parametrize(
    ("kind", "good", "value"), [(positive, "3", 3), (not_negative, "0", 0), (duration, "0.5", 0.5)]
)
def test_what_is_right_is_read(kind: Callable[[str], Any], good: str, value: float) -> None:
    assert kind(good) == value


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(positive, "0"), (positive, "1.5"), (not_negative, "-1"), (duration, "0"), (duration, "nan"), (duration, "inf")],
)
def test_what_is_wrong_is_said(kind: Callable[[str], Any], bad: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{bad}'"):
        kind(bad)


def test_a_device_that_is_not_here_is_named() -> None:
    assert usable_device("cpu") == "cpu"
    with pytest.raises(argparse.ArgumentTypeError, match="'cuda:99' is not usable here"):
        usable_device("cuda:99")


def test_errors_end_a_command_with_one_line(tmp_path: Path) -> None:
    def missing() -> None:
        (tmp_path / "missing").read_text()

    def wrong() -> None:
        raise GroceriesError("as told")

    with pytest.raises(SystemExit, match=r"^error: .*missing: No such file or directory$"):
        run_command_line(missing)
    with pytest.raises(SystemExit, match=r"^error: as told$"):
        run_command_line(wrong)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"plain text"])
def test_damaged_data_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sequences.npz").write_bytes(content)
    with pytest.raises(GroceriesError, match=r"sequences\.npz: not what this version's prepare\.py writes"):
        load_sequences(tmp_path)
