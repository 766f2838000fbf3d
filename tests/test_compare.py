"""`--compare`: every recipe in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka_serve import build
from loka_serve.bundle import Bundle
from loka_serve.compare import RECIPES
from tests.building import build_arguments


def test_all_recipes_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loka_serve.compare.TIMED_SECONDS", 0.0)  # one pass over the histories
    assert build.main(build_arguments(tmp_path, "--compare", "--quiet")) == 0
    output = capsys.readouterr().out
    bundle = Bundle.load(tmp_path / "bundle")
    assert "comparison.json" in bundle.manifest["files"]
    values = json.loads((tmp_path / "bundle" / "comparison.json").read_text())
    rows = {row["recipe"]: row for row in values["rows"]}
    assert tuple(rows) == RECIPES and values["chosen"] == "auto"
    assert rows["auto"]["gate"] == bundle.gate
    assert rows["bf16"]["gate"]["top_k_overlap"] == 1.0 > rows["fp8_tensor"]["gate"]["top_k_overlap"]
    # One and the same BF16 model on the same histories stands on the other side of every comparison.
    assert len({json.dumps({m: q["bf16"] for m, q in row["gate"]["quality"].items()}) for row in rows.values()}) == 1
    for recipe in ("fp8_tensor", "fp8_row", "fp8_block", "int8_row", "auto"):
        assert 0.5 < rows[recipe]["weight_bytes"] / rows["bf16"]["weight_bytes"] < 0.56  # scales on narrow weights
    assert all(row["milliseconds_per_history"] > 0 for row in rows.values())
    assert values["headings"][:3] == ["recipe", "top-1", "top-16"] and "recall@10" in values["headings"]
    assert [line.split()[0] for line in output.splitlines() if line.split("  ")[0] in RECIPES] == list(RECIPES)
    assert "says nothing" not in output and "say nothing about FP8's speed" in output
    report = json.loads((tmp_path / "bundle" / "report.json").read_text())
    assert report["comparison"] == values
    assert sorted(path.name for path in tmp_path.iterdir() if "bundle" in path.name) == ["bundle"]


def test_an_engine_that_does_not_run_here_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loka_serve.compare.RECIPES", ("bf16", "int8_row", "auto"))
    assert build.main(build_arguments(tmp_path, "--compare", "--engine", "hopper")) == 0
    rows = json.loads((tmp_path / "bundle" / "comparison.json").read_text())["rows"]
    assert [(row["recipe"], row["milliseconds_per_history"]) for row in rows] == [
        ("bf16", None), ("int8_row", None), ("auto", None),
    ]  # fmt: skip
    assert "int8_row is not timed: " in capsys.readouterr().out
