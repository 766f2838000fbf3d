"""The README's tables are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.readme_gpu_tables import GPU_TABLES, gpu_tables
from benchmarks.readme_tables import GPU_RESULTS, README, TABLES, render

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "1.2",
    "cuda": "13.0",
    "libraries": {"torch": "2.11"},
    "command": "python -m benchmarks.engine",
}


def test_readme_shows_the_committed_results() -> None:
    current = README.read_text()
    assert render(current) == current, "run make readme"
    for name in [*TABLES, *gpu_tables(GPU_RESULTS)]:
        assert f"<!-- table: {name} -->" in current


def test_results_that_are_not_there_leave_the_readme_as_it_is(tmp_path: Path) -> None:
    marked = "".join(f"<!-- table: {name} -->\nold {name}\n<!-- end -->\n" for name in GPU_TABLES)
    assert render(marked, tmp_path) == marked
    (tmp_path / "ablation.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": []}))
    rendered = render(marked, tmp_path)
    assert "old engine" in rendered and "old kernels" in rendered and "old ablation" not in rendered


def engine_row(precision: str, batch: int, catalog: str, **changes: Any) -> dict[str, Any]:
    return {
        "precision": precision,
        "batch": batch,
        "beam": 512,
        "context": 3000,
        "catalog": catalog,
        "latency_ms_p50": 20.0,
        "latency_ms_p99": 22.0,
        "req_per_s": 400.0,
        "floor_ms": 10.0,
        "joules_per_request": 1.5,
        "yardstick_eager_ms": 70.0,
        "yardstick_graph_ms": None,
        **changes,
    }


def test_engine_table(tmp_path: Path) -> None:
    rows = [
        engine_row("fp8", 8, "none"),
        engine_row("bf16", 8, "none", latency_ms_p50=33.0),
        engine_row("fp8", 8, "10m", latency_ms_p50=21.0, req_per_s=390.0),
        engine_row("fp8", 32, "none", req_per_s=500.0, joules_per_request=None),
        engine_row("fp8", 32, "none", beam=128, context=512),
    ]
    ceilings = {"bf16_tflops": 795.2, "fp8_tflops": 1499.0, "gb_per_s": 4250.0}
    content = {"environment": ENVIRONMENT, "ceilings": ceilings, "rows": rows}
    (tmp_path / "engine.json").write_text(json.dumps(content))
    table = gpu_tables(tmp_path)["engine"]
    assert "| 8 | 33.0 | 20.0 / 22.0 | 400 | 21.0 | 390 | 1.65x | 2.00x | 3.50x /  | 1.50 |" in table
    assert "| 512 | 3000 | 400 (batch 8) | 500 (batch 32) | 390 (batch 8) |" in table
    assert "| 128 | 512 |  | 400 (batch 32) |  |" in table
    assert "NVIDIA H200, driver 1.2" in table and "copy 4.25 TB/s" in table


def test_kernels_table_names_the_fastest_library(tmp_path: Path) -> None:
    def row(shape: str, us: float, baseline: str, baseline_us: float) -> dict[str, Any]:
        figures = {"tflops": 0.0, "gb_per_s": 1000.0, "ratio": baseline_us / us}
        return {
            "op": "radix_topk",
            "shape": shape,
            "us": us,
            "baseline": baseline,
            "baseline_us": baseline_us,
        } | figures

    rows = [row("big", 200.0, "slow", 1600.0), row("big", 200.0, "fast", 1400.0), row("small", 10.0, "slow", 100.0)]
    (tmp_path / "kernels.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))
    table = gpu_tables(tmp_path)["kernels"]
    assert "| radix topk | big | 200.0 |  | 1000 | fast, 1400.0 us | 7.00x | 7.00x to 10.00x (2) |" in table


def test_ablation_table(tmp_path: Path) -> None:
    row = {
        "step": "fp8",
        "latency_ms_p50": 20.0,
        "req_per_s": 400.0,
        "gain_points": 120.4,
        "paper_latency_ms": None,
        "paper_req_per_s": 346.4,
        "paper_gain_points": 42.0,
    }
    (tmp_path / "ablation.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": [row]}))
    assert "| + FP8 | 20.0 | 400 | +120 |  | 346 | +42 |" in gpu_tables(tmp_path)["ablation"]
