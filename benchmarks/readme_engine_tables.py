"""Tables of the hopper engine beside the reference engine, beside itself, and behind HTTP."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import markdown_table, number, source

Result = dict[str, Any]


def agreement_table(result: Result) -> str:
    """Each model beside the reference engine, and beside itself in other company."""
    lines = []
    pairs = ("hopper_against_reference", "reference_bf16_against_reference")
    for row in result["rows"]:
        errors = (" / ".join(f"{level['relative_rms']:.3f}" for level in row["logits"][pair]) for pair in pairs)
        overlaps = (number(row.get(pair, {}).get("top_50_overlap"), 3) for pair in pairs)
        itself = (
            f"{100 * row[mode]['alone']['bitwise_equal']:.0f} %, {row[mode]['batch_ms']:.2f} ms"
            for mode in ("hopper_with_itself", "batch_invariant_with_itself")
        )
        lines.append([row["name"], *errors, *overlaps, *itself])
    header = [
        "model",
        "error of the logits by level",
        "of bfloat16",
        "top-50 overlap",
        "of bfloat16",
        "alone the same bits, a batch takes",
        "batch-invariant",
    ]
    return f"{markdown_table(header, lines)}\n\n{source(result)}"


def serving_table(result: Result) -> str:
    """HTTP beside the engine alone."""
    lines = []
    for row in result["rows"]:
        opened = row["open_loop"]
        latency = opened["latency_ms"]
        lines.append(
            [
                str(row["batch"]),
                number(row["engine"]["req_per_s"], 0),
                number(row["http"]["req_per_s"], 0),
                f"{100 * row['http_over_engine']:.1f} %",
                number(opened["offered_per_s"], 0),
                " / ".join(number(latency[name]) for name in ("p50", "p90", "p99", "p99.9")),
            ]
        )
    header = [
        "largest batch",
        "engine alone, req/s",
        "over HTTP, req/s",
        "share",
        "open loop, req/s",
        "ms: p50 / p90 / p99 / p99.9",
    ]
    return f"{markdown_table(header, lines)}\n\n{source(result)}"
