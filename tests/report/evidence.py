"""Evidence as a build leaves it, small enough to work figures out by hand."""

from __future__ import annotations

from typing import Any


def site(
    name: str,
    kind: str = "linear",
    recipe: str = "fp8_row",
    shape: tuple[int, ...] = (128, 64),
    rows: int = 100,
    frobenius: float = 0.04,
    reason: str = "fp8_row is within bounds",
) -> dict[str, Any]:
    """A site of ``probe.json``; its floored MERE is twice its Frobenius error, BF16's a tenth of both."""
    stored = 16384 if recipe == "bf16" else 8704

    def error(size: float) -> dict[str, Any]:
        return {"output": {"floored_mere": 2 * size, "relative_frobenius": size, "sqnr_db": 28.0, "mere": 0.5}}

    eight_bits = {name: error(frobenius) for name in ("fp8_tensor", "fp8_row", "fp8_block", "int8_row")}
    return {
        "name": name,
        "kind": kind,
        "shape": list(shape),
        "inputs": {"rows": rows, "absmax": 6.0, "p99": 3.0, "octaves": {"-3": 10, "0": 80, "1": 9, "2": 1}},
        "errors": {"bf16": error(frobenius / 10), **eight_bits},
        "choice": {"recipe": recipe, "reason": reason},
        "bf16_bytes": 16384,
        "weight_bytes": stored,
    }


def probe() -> dict[str, Any]:
    """Two linears in FP8, of which the second has four times the work, experts, and a head that stays."""
    return {
        "sites": [
            site("layers.0.query", frobenius=0.03),
            site("layers.0.output", rows=400, frobenius=0.05),
            site("layers.0.moe.down", "grouped", "fp8_block", (8, 64, 128), rows=100),
            site("heads.0", "head", "bf16", reason="fp8_row: keeps 95.00% of the top codes, below 99%"),
        ]
    }


def gate(**changes: Any) -> dict[str, Any]:
    """Content of ``gate.json``."""
    return {
        "passed": True,
        "rows": 120,
        "top_k": 50,
        "top_1_agreement": 0.9,
        "top_1_interval": [0.85, 0.95],
        "top_k_overlap": 0.96,
        "top_k_interval": [0.955, 0.965],
        "min_top_k_overlap": 0.9,
        "quality": {"recall@10": {"bf16": 0.2, "quantized": 0.201, "change_interval": [-0.001, 0.003]}},
        "calibration": {
            "expected_calibration_error": {"bf16": 0.05, "quantized": 0.06},
            "score_shift_nats": -0.002,
            "score_distance_nats": 0.03,
        },
        "warnings": [],
        **changes,
    }


def dispatch() -> dict[str, Any]:
    """A table as `loka_serve.kernels.dispatch.Dispatch.save` writes it: the linears' shape at two numbers of rows."""

    def entry(rows: int, us: dict[str, float], bf16_us: float) -> dict[str, Any]:
        return {
            "shape": {"op": "linear", "recipe": "fp8_row", "n": 128, "k": 64, "rows": rows},
            "us": us,
            "bf16_us": bf16_us,
        }

    return {
        "environment": {"gpu": "NVIDIA H200", "driver": "580.1", "triton": None},
        "entries": [entry(4096, {"torch": 5.0, "triton": 4.0}, 10.0), entry(8, {"torch": 2.0}, 2.0)],
    }


def comparison() -> dict[str, Any]:
    """Content of ``comparison.json``: BF16 and auto."""
    rows = [
        {"recipe": recipe, "weight_bytes": 1, "milliseconds_per_history": time, "not_timed": "", "gate": gate()}
        for recipe, time in (("bf16", 3.0), ("auto", 2.0))
    ]
    table = [["bf16", "3"], ["auto", "2"]]
    return {
        "chosen": "auto",
        "timed_on": "a GPU",
        "emulated": False,
        "headings": ["recipe", "ms"],
        "table": table,
        "rows": rows,
    }
