"""The engine benchmark's rows, with an engine that computes nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ablation import PAPER_BASELINE_REQ_PER_S, Ablation, table_steps
from benchmarks.decoders import Decoder, fp8_plan
from benchmarks.engine import Bench, Case, all_cases, select_cases
from benchmarks.floor import Ceilings, floor_ms
from benchmarks.results import ResultFile
from benchmarks.synthetic_catalog import skewed_trie
from benchmarks.yardstick import Shape, YardstickTimes
from loka_serve.errors import ConfigError, EngineError
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2

from .fakes import FakeEngine

TINY = PRESETS["tiny"]
CPU = torch.device("cpu")
CEILINGS = Ceilings(800.0, 1500.0, 4200.0)
FIELDS = {
    "preset", "precision", "batch", "beam", "context", "catalog", "latency_ms_p50", "latency_ms_p99", "req_per_s",
    "floor_ms", "floor_ratio", "joules_per_request", "yardstick_eager_ms", "yardstick_graph_ms",
}  # fmt: skip
CASES = [
    Case("fp8", 2, 16, 8, "none"),
    Case("fp8", 1, 16, 20, "none"),
    Case("bf16", 2, 16, 8, "none"),
    Case("fp8", 2, 16, 8, "10m"),
]


def make_bench(engine: FakeEngine, **changes: Any) -> Bench:
    settings: dict[str, Any] = {
        "preset": "tiny",
        "config": TINY,
        "device": CPU,
        "tries": {"none": None, "10m": skewed_trie(1000, TINY.codebook_sizes)},
        "ceilings": CEILINGS,
        "yardstick": {Shape(2, 16, 8): YardstickTimes(70.0, 50.0)},
        "meter": None,
        "seconds": 0.0,
        "context_precision": "fp8",
        "deadline": time.monotonic() + 60,
        "open_decoder": engine.open,
    }
    return Bench(**{**settings, **changes})


def test_rows() -> None:
    engine = FakeEngine(seconds=0.001)
    bench = make_bench(engine)
    rows = list(bench.rows(CASES))
    assert [Case(*(row[field] for field in Case._fields)) for row in rows] == CASES
    for row in rows:
        assert set(row) >= FIELDS
        expected = floor_ms(TINY, row["precision"], *CASES[0].shape, CEILINGS, row["context_precision"])
        if row["context"] == CASES[0].context:
            assert row["floor_ratio"] == pytest.approx(row["latency_ms_p50"] / expected, rel=0.01)
    assert [row["yardstick_eager_ms"] for row in rows] == [70.0, None, 70.0, 70.0]
    # One decoder for each precision and catalog, with the shapes of its rows.
    assert [len(opened[1]) for opened in engine.opened] == [2, 1, 1]
    assert engine.opened[0][1] == [(2, 16, 8), (1, 16, 20)]
    assert [opened[2]["precision"] for opened in engine.opened] == ["fp8", "bf16", "fp8"]
    assert [opened[2]["context_precision"] for opened in engine.opened] == ["fp8", "bf16", "fp8"]
    assert engine.opened[0][0] is None and engine.opened[2][0] is not None
    assert engine.captured == [tuple(case.shape) for case in CASES]


def test_a_failing_case_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(make_bench(FakeEngine(failing_batch=1)).rows(CASES))
    assert len(rows) == len(CASES) - 1
    assert "fp8/b1/w16/c20/none failed: RuntimeError: out of memory" in capsys.readouterr().out


def test_answers_that_are_none_are_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(make_bench(FakeEngine(nan_batch=2)).rows(CASES))
    assert [row["batch"] for row in rows] == [1]
    assert "requests without an answer" in capsys.readouterr().out


def test_an_engine_that_does_not_open_costs_its_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()

    def open_decoder(*arguments: Any) -> Decoder:
        if arguments[-1]["precision"] == "bf16":
            raise EngineError("lower a limit")
        return engine.open(*arguments)

    rows = list(make_bench(engine, open_decoder=open_decoder).rows(CASES))
    assert [row["precision"] for row in rows] == ["fp8"] * 3
    assert "1 rows of bf16, catalog none failed: EngineError: lower a limit" in capsys.readouterr().out


def test_out_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert not list(make_bench(engine, deadline=time.monotonic() - 1).rows(CASES))
    assert not engine.opened
    assert "2 rows of fp8, catalog none, are left out" in capsys.readouterr().out


def test_every_row_of_the_issue_can_be_chosen() -> None:
    cases = all_cases()
    assert len(cases) == len(set(cases)) == 5 * 2 * 2 * 2 * 2
    assert select_cases(None) == cases
    assert select_cases(["bf16/b8/w512/c3000/10m"]) == [Case("bf16", 8, 512, 3000, "10m")]
    assert len(select_cases(["*/w512/c3000/none"])) == 10
    with pytest.raises(ConfigError, match=r"^--only: expected patterns of names like .*, no row fits \['int8/\*'\]"):
        select_cases(["int8/*"])


def test_results_are_written_row_by_row_and_taken_over(tmp_path: Path) -> None:
    environment = {"gpu": "H200", "commit": "1"}
    first = ResultFile(tmp_path / "new" / "first.json", {"environment": environment})
    for batch in (1, 8):
        first.add({"batch": batch, "us": 1.0})
        assert len(json.loads((tmp_path / "new" / "first.json").read_text())["rows"]) == (1 if batch == 1 else 2)
    second = ResultFile(tmp_path / "second.json", {"environment": environment})
    second.keep(tmp_path / "new" / "first.json", ("batch",), {(8,)})
    second.add({"batch": 8, "us": 2.0})
    assert [path.name for path in sorted(tmp_path.glob("*.json*"))] == ["second.json"]
    assert json.loads((tmp_path / "second.json").read_text())["rows"] == [
        {"batch": 1, "us": 1.0},
        {"batch": 8, "us": 2.0},
    ]
    other = ResultFile(tmp_path / "third.json", {"environment": {**environment, "commit": "2"}})
    with pytest.raises(ConfigError, match="its commit is 1: expected 2"):
        other.keep(tmp_path / "second.json", ("batch",), set())
    for damaged in ("{", "[]", '{"environment": {"gpu": "H200", "commit": "2"}, "rows": [{}]}'):
        (tmp_path / "damaged.json").write_text(damaged)
        with pytest.raises(ConfigError, match="--keep: .*damaged.json is no result file"):
            other.keep(tmp_path / "damaged.json", ("batch",), set())


def test_ablation_rows() -> None:
    engine = FakeEngine(seconds=0.002)
    shape = Shape(2, 16, 8)
    ablation = Ablation(
        TINY, CPU, {shape: YardstickTimes(8.0, None)}, 0.0, None, "fp8", shape, open_decoder=engine.open
    )
    rows = list(ablation.rows())
    assert [row["step"] for row in rows] == ["baseline", "infrastructure", "fp8", "operators"]
    assert rows[0]["req_per_s"] == 250.0 and rows[0]["gain_points"] == 0 and rows[0]["latency_ms_p99"] is None
    assert rows[1]["gain_points"] == pytest.approx(100 * (rows[1]["req_per_s"] - 250) / 250, abs=0.1)
    assert sum(row["gain_points"] for row in rows) == pytest.approx(100 * (rows[-1]["speedup"] - 1), abs=0.3)
    assert [row["paper_req_per_s"] for row in rows] == [PAPER_BASELINE_REQ_PER_S, 260.4, 346.5, 393.6]
    assert [opened[2] for opened in engine.opened] == [row["options"] for row in rows[1:]]
    assert engine.opened[-1][2]["context_precision"] == "fp8"
    assert {frozenset(row) for row in rows} == {frozenset(rows[0])}


def test_ablation_without_a_yardstick_starts_from_our_eager_engine() -> None:
    engine = FakeEngine(seconds=0.001)
    rows = list(Ablation(TINY, CPU, {}, 0.0, shape=Shape(1, 4, 8), open_decoder=engine.open).rows())
    assert rows[0]["source"] == "hopper" and not rows[0]["options"]["graphs"]
    assert len(engine.opened) == 4


def test_the_engine_has_the_options_of_the_ablation() -> None:
    options = pytest.importorskip("loka_serve.engines.hopper.options")
    for step in table_steps("fp8"):
        options.HopperOptions(**{name: value for name, value in step.options.items() if name != "precision"})


def test_every_site_has_a_recipe() -> None:
    with torch.device("meta"):
        sites = OneRecV2(TINY).sites()
    plan = fp8_plan(sites)
    plan.check_sites(sites)
    assert plan["layers.1.moe.router"] == "bf16"
    assert plan["layers.1.moe.gate_up"] == plan["layers.1.moe.shared.down"] == "fp8_block"
    assert plan["layers.0.mlp.down"] == plan["heads.2"] == plan["context.projection"] == "fp8_row"
