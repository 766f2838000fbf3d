"""The dispatch benchmark on scripted measurements: agreement, wins, what one library alone would take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import dispatch as module
from benchmarks.dispatch import Measured, again, measure_twice, record_of, summary_of
from loka_serve.dispatch.sites import work_of_sites
from loka_serve.kernels.dispatch import Dispatch, Entry, Environment, Shape
from loka_serve.kernels.dispatch_rule import Candidate
from loka_serve.models.config import PRESETS

SITES = work_of_sites(PRESETS["onerec-v2-4b-a0.5b"])
HERE = Environment("NVIDIA H200", "580.1", "13.0", "2.11.0", "3.6.0", None)


def candidates(scale: float = 1.0, **us: float) -> list[Candidate]:
    """By recipe and library, as bf16_triton=10.0."""
    found = []
    for name, time in us.items():
        recipe, _, library = name.rpartition("_")
        found.append(Candidate(library, library, recipe, scale * time, 0.005 if recipe == "bf16" else 0.08))
    return sorted(found, key=lambda it: it.us)


FIRST = candidates(fp8_row_cublaslt=6.0, fp8_block_triton=6.1, bf16_cublaslt=10.0, fp8_tensor_cublaslt=5.0)


def test_the_second_measurement_judges_the_first_one_s_choice() -> None:
    cell = ("linear", 8, 4, 1, 512)
    second = candidates(fp8_row_cublaslt=6.3, fp8_block_triton=6.0, bf16_cublaslt=10.0, fp8_tensor_cublaslt=5.0)
    found = again(Measured(cell, 1, FIRST, second))
    assert found is not None
    assert (found["us"], found["best"], found["best_us"], found["ratio"]) == (6.3, "triton fp8_block", 6.0, 1.05)
    assert not found["close"]
    same = again(Measured(cell, 1, FIRST, FIRST))
    assert same is not None and same["ratio"] == 1.0 and same["close"]
    assert again(Measured(cell, 1, FIRST)) is None
    slow = candidates(fp8_row_cublaslt=9.6, bf16_cublaslt=10.0)  # a gain too small to count, whatever comes later
    refused = again(Measured(cell, 1, slow, candidates(fp8_row_cublaslt=9.0, bf16_cublaslt=10.0)))
    assert refused is not None and refused["best"] == "cublaslt bf16" and refused["ratio"] == 1.0


def test_the_summary_counts_wins_and_weighs_by_the_model_s_sites() -> None:
    many = Measured(("linear", 8, 4, 1, 512), 10, FIRST, FIRST)
    other = candidates(fp8_row_cublaslt=9.9, fp8_block_triton=4.0, bf16_cublaslt=10.0)
    few = Measured(("linear", 16, 4, 1, 512), 1, other, candidates(2.0, fp8_block_triton=4.0, bf16_cublaslt=10.0))
    summary = summary_of([many, few])
    assert (summary["cells"], summary["measured_again"], summary["within_3_percent"]) == (2, 2, 2)
    assert summary["wins_by_library"] == {"cublaslt": 1, "triton": 1}
    assert summary["wins_by_recipe"] == {"fp8_row": 1, "fp8_block": 1}
    # 10 x 6 + 4 by dispatch; triton alone 10 x 6.1 + 4, cuBLASLt alone 10 x 6 + 10 in BF16.
    (rows,) = summary["by_rows"]
    assert rows == {"rows": 512, "dispatch_us": 64.0, "best_alone": "triton", "best_alone_us": 65.0, "bf16_us": 110.0}


def test_a_row_has_what_the_table_shows_and_all_candidates() -> None:
    measured = Measured(("linear", 8, 4, 1, 512), 3, FIRST, FIRST)
    row = record_of(measured, {("linear", 8, 4, 1): "layers.*.output"})
    expected = {
        "site": "layers.*.output", "rows": 512, "choice": "cublaslt", "library": "cublaslt", "recipe": "fp8_row",
        "us": 6.0, "bf16_us": 10.0, "mere": 0.08, "runner_up": "triton fp8_block 6.1", "sites": 3,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert len(row["candidates"]) == 4 and row["again"]["close"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; each shape that is measured takes one."""
    now = [0.0]

    def measure(shapes: Sequence[Shape], device: str) -> Dispatch:
        now[0] += len(shapes)
        times = {"bf16": 10.0, "fp8_row": 6.0, "fp8_block": 8.0, "fp8_tensor": 5.0}
        entries = {it: Entry({"torch": times[it.recipe]}, 10.0, {"torch": 0.08}) for it in shapes}
        return Dispatch(torch.device("cpu"), HERE, entries)

    monkeypatch.setattr(Dispatch, "measure", measure)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_both_measurements_of_every_cell_within_the_budget(clock: list[float]) -> None:
    cells, skipped = measure_twice(SITES, [512, 8], end=1000.0)
    assert len(cells) == 12 and not skipped
    assert all(again(measured) is not None for measured in cells)
    by_shape = {measured.cell[:4]: measured.sites for measured in cells}
    assert by_shape["experts", 1408, 1408, 54] == 12 and by_shape["linear_float32", 8192, 1408, 1] == 3
    assert by_shape["linear", 1408, 1408, 1] == 1 + 3 * 14 and by_shape["linear", 1408, 3840, 1] == 2


def test_what_the_budget_does_not_reach_is_named(clock: list[float]) -> None:
    cells, skipped = measure_twice(SITES, [512, 8, 1], end=30.0)
    assert cells and skipped and len(cells) + len(skipped) == 18
    assert clock[0] <= 30.0 + 2 * 4  # one cell beyond the end of either measurement
    assert skipped[-1]["rows"] == 1


def test_the_command_writes_one_file(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "dispatch.json"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(module, "describe_environment", lambda commit: {"gpu": "NVIDIA H200", "commit": commit})
    arguments = ["--out", str(out), "--rows", "512", "--workers", "0", "--commit", "abc", "--budget", "500"]
    monkeypatch.setattr("sys.argv", ["dispatch", *arguments])
    module.main()
    content = json.loads(out.read_text())
    assert content["environment"] == {"gpu": "NVIDIA H200", "commit": "abc"}
    assert content["libraries"].keys() >= {"cublaslt", "deep_gemm", "fbgemm", "torchao", "flashinfer", "triton"}
    assert len(content["rows"]) == content["summary"]["cells"] == content["summary"]["within_3_percent"] == 6
    dense = [row for row in content["rows"] if "moe" not in row["site"]]
    assert {(row["recipe"], row["us"]) for row in dense} == {("fp8_row", 6.0)}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == 6
