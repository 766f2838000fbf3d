"""The comparison of recipes: what its file says, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import comparison
from loka_serve.compare import RECIPES
from tests.building import build_arguments


def test_the_file_says_what_was_compared_and_with_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka_serve.compare.TIMED_SECONDS", 0.0)  # one pass over the histories
    given = build_arguments(tmp_path)
    paths = {flag: given[given.index(flag) + 1] for flag in ("--checkpoint", "--catalog", "--calibration")}
    out = tmp_path / "results" / "comparison.json"
    words = [word for flag, path in paths.items() for word in (flag, path)]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "comparison",
            *words,
            "--rows",
            "20",
            "--calibration-rows",
            "4",
            "--commit",
            "abc",
            "--batch",
            "5",
            "--cpu-threads",
            "1",
            "--out",
            str(out),
        ],
    )
    comparison.main()
    written = json.loads(out.read_text())
    rows = {row["recipe"]: row for row in written["comparison"]["rows"]}
    assert tuple(rows) == RECIPES and written["comparison"]["chosen"] == "auto"
    assert all(row["gate"]["rows"] == written["held_out_histories"] == 20 for row in rows.values())
    assert written["comparison"]["timed_on"].startswith("reference engine on CPU, batches of 5")
    recall = rows["auto"]["gate"]["quality"]["recall@10"]
    assert recall["bf16"] > 0  # else there is nothing to relate to
    assert written["auto"]["recall@10_relative_change"] == pytest.approx(recall["quantized"] / recall["bf16"] - 1)
    assert sum(written["auto"]["sites_by_recipe"].values()) > 0
    assert written["environment"]["commit"] == "abc" and written["environment"]["libraries"]["torch"]
    assert written["checkpoint"] == comparison.digest(Path(paths["--checkpoint"]))
    assert [path.name for path in out.parent.iterdir()] == ["comparison.json"]
