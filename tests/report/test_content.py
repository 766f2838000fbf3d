"""What the report says, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest

from loka_serve.report.content import gather
from loka_serve.report.dispatch import NO_ENTRIES, NOT_MEASURED, speed_by_rows
from loka_serve.report.frontier import frontier
from tests.report.evidence import dispatch, gate, probe


def test_the_summary_counts_sites_work_and_bytes() -> None:
    report = gather("m", "hopper", probe(), gate())
    summary = report["summary"]
    assert (summary["sites"], summary["quantized_sites"]) == (4, 3)
    # Every weight has 8,192 values a row of input; 100 + 400 + 100 of 700 rows go to sites in 8 bits.
    assert summary["quantized_work_share"] == pytest.approx(6 / 7)
    assert (summary["bf16_bytes"], summary["weight_bytes"]) == (4 * 16384, 3 * 8704 + 16384)
    assert summary["by_kind"][0] == {"kind": "dense linears", "recipes": {"fp8_row": 2}}
    assert [entry["name"] for entry in summary["kept"]] == ["heads.0"]
    assert summary["largest_error"] == {"site": "layers.0.output", "recipe": "fp8_row", "floored_mere": 0.1}
    assert report["sites"][0]["octaves"] == {-3: 10, 0: 80, 1: 9, 2: 1}


def test_speed_by_rows_takes_the_fastest_library_and_says_where_nothing_was_measured() -> None:
    speed = speed_by_rows(probe()["sites"], dispatch())
    assert speed["measured"] and speed["environment"]["gpu"] == "NVIDIA H200"
    assert {cell["site"] for cell in speed["cells"]} == {"layers.0.query", "layers.0.output"}
    of_query = [cell for cell in speed["cells"] if cell["site"] == "layers.0.query"]
    assert [(cell["rows"], cell["library"], cell["us"]) for cell in of_query] == [
        (8, "torch", 2.0),
        (4096, "triton", 4.0),
    ]
    assert speed_by_rows(probe()["sites"], None)["reason"] == NOT_MEASURED
    other_output = [{**entry, "shape": {**entry["shape"], "op": "linear_float32"}} for entry in dispatch()["entries"]]
    assert not speed_by_rows(probe()["sites"], {**dispatch(), "entries": other_output})["measured"]
    nothing = speed_by_rows(probe()["sites"], {**dispatch(), "entries": []})
    assert (nothing["measured"], nothing["reason"]) == (False, NO_ENTRIES)


def test_the_modelled_frontier() -> None:
    result = frontier(probe()["sites"], speed_by_rows(probe()["sites"], None))
    assert result["measured_share"] == 0.0
    # Saved per squared error: output 200 / .0025 = 80,000, query 50 / .0009 = 56,000, experts 50 / .0016 = 31,000.
    assert [point["site"] for point in result["points"]] == [
        None, "layers.0.output", "layers.0.query", "layers.0.moe.down",
    ]  # fmt: skip
    assert [point["time"] for point in result["points"]] == pytest.approx([1, 500 / 700, 450 / 700, 400 / 700])
    # BF16's own error, a tenth, is no cost of FP8.
    squares = [0.99 * error**2 for error in (0.05, 0.03, 0.04)]
    errors = [0.0, *(math.sqrt(sum(squares[:count])) for count in (1, 2, 3))]
    assert [point["error"] for point in result["points"]] == pytest.approx(errors)


def test_the_frontier_takes_measured_ratios_at_the_largest_rows() -> None:
    result = frontier(probe()["sites"], speed_by_rows(probe()["sites"], dispatch()))
    # The linears take 4 of 10 us; the experts are modelled.
    assert result["points"][-1]["time"] == pytest.approx((0.4 * 500 + 0.5 * 100 + 100) / 700)
    assert result["measured_share"] == pytest.approx(500 / 700)


def test_an_error_that_is_not_finite_costs_everything() -> None:
    evidence = probe()
    evidence["sites"][0]["errors"]["fp8_row"]["output"]["relative_frobenius"] = None
    evidence["sites"][0]["errors"]["fp8_row"]["output"]["floored_mere"] = None
    result = frontier(evidence["sites"], speed_by_rows(evidence["sites"], None))
    assert result["points"][-1]["site"] == "layers.0.query" and result["points"][-1]["error"] > 1
