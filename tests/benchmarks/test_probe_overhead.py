"""The probe's overhead: the formula by hand, a real run's row, arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.probe_overhead import Times, main, to_row


def test_overhead_by_hand() -> None:
    assert Times(plain=10.0, observed=30.0, passing=0.0).overhead(100) == pytest.approx(0.02)
    assert Times(plain=10.0, observed=30.0, passing=0.05).overhead(100) == pytest.approx(0.025)
    assert Times(plain=10.0, observed=20.0, passing=0.0).overhead(1) == pytest.approx(1.0)


def test_a_row() -> None:
    assert to_row(Times(0.01, 0.03, 2e-6), 100, preset="tiny") == {
        "preset": "tiny",
        "every": 100,
        "plain_ms": 10.0,
        "observed_ms": 30.0,
        "passing_us": 2.0,
        "overhead": 0.0202,
    }


@pytest.mark.parametrize("more", [[], ["--covariance", "--every", "10"]])
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    out = tmp_path / "overhead.json"
    small = ["--batch", "2", "--beam", "4", "--context", "8", "--catalog-items", "100", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", ["probe_overhead", "--out", str(out), "--device", "cpu", *small, *more])
    main()
    content = json.loads(out.read_text())
    (row,) = content["rows"]
    assert content["environment"]["libraries"]["torch"]
    assert row["every"] == (10 if more else 100) and row["covariance"] is bool(more)
    assert row["plain_ms"] > 0 and row["observed_ms"] > 0 and row["passing_us"] > 0
    assert row["state_bytes"] > (1_000_000 if more else 200_000)


def test_no_folder_for_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["probe_overhead", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
