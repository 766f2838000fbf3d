"""Tables of what was measured on the GPU: summaries of the result files, which hold all rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown_table, number, ratio, source
from benchmarks.readme_engine_tables import agreement_table, serving_table

Row = dict[str, Any]
Result = dict[str, Any]

HEADLINE_BEAM, HEADLINE_CONTEXT = 512, 3000
STEP_NAMES = {
    "baseline": "BF16, eager",
    "infrastructure": "+ infrastructure (graphs, two batches in flight, attention and MoE kernels)",
    "fp8": "+ FP8",
    "operators": "+ operators (radix top-k, fused quantization)",
}


def engine_table(result: Result) -> str:
    """Batches at the headline shape, then the best throughput at every shape."""
    rows: list[Row] = result["rows"]
    cases = {(row["precision"], row["catalog"], row["batch"], row["beam"], row["context"]): row for row in rows}
    batches = sorted({row["batch"] for row in rows})
    lines = []
    for batch in batches:
        fp8, bf16, constrained = (
            cases.get((precision, catalog, batch, HEADLINE_BEAM, HEADLINE_CONTEXT), {})
            for precision, catalog in (("fp8", "none"), ("bf16", "none"), ("fp8", "10m"))
        )
        if not (fp8 or bf16 or constrained):
            continue
        median = fp8.get("latency_ms_p50")
        lines.append(
            [
                str(batch),
                number(bf16.get("latency_ms_p50")),
                f"{number(median)} / {number(fp8.get('latency_ms_p99'))}",
                number(fp8.get("req_per_s"), 0),
                number(constrained.get("latency_ms_p50")),
                number(constrained.get("req_per_s"), 0),
                ratio(bf16.get("latency_ms_p50"), median),
                ratio(median, fp8.get("floor_ms")),
                " / ".join(ratio(fp8.get(f"yardstick_{mode}_ms"), median) for mode in ("eager", "graph")),
                number(fp8.get("joules_per_request"), 2),
            ]
        )
    header = [
        "batch",
        "BF16 ms",
        "FP8 ms, p50 / p99",
        "FP8 req/s",
        "10 M items: ms",
        "req/s",
        "FP8 over BF16",
        "FP8 over its floor",
        "over the yardstick, eager / graph",
        "J a request",
    ]
    tables = [markdown_table(header, lines)] if lines else []
    return "\n\n".join([*tables, _best_throughput(rows), source(result)])


def _best_throughput(rows: list[Row]) -> str:
    """Requests a second at the best batch, for every beam, context, precision and catalog."""
    columns = sorted({(row["precision"], row["catalog"]) for row in rows}, key=lambda key: (key[1] != "none", key[0]))
    lines = []
    for beam, context in sorted({(row["beam"], row["context"]) for row in rows}, reverse=True):
        line = [str(beam), str(context)]
        for precision, catalog in columns:
            key = (precision, catalog, beam, context)
            found = [row for row in rows if (row["precision"], row["catalog"], row["beam"], row["context"]) == key]
            best = max(found, key=lambda row: row["req_per_s"], default=None)
            line.append(f"{best['req_per_s']:.0f} (batch {best['batch']})" if best else "")
        lines.append(line)
    names = {"none": "", "10m": ", 10 M items"}
    header = [f"{precision.upper()}{names.get(catalog, catalog)}, req/s" for precision, catalog in columns]
    return markdown_table(["beam", "context", *header], lines)


def ablation_table(result: Result) -> str:
    """Ours beside the paper's."""
    lines = [
        [
            STEP_NAMES.get(row["step"], row["step"]),
            number(row["latency_ms_p50"]),
            number(row["req_per_s"], 0),
            f"{row['gain_points']:+.0f}" if row["gain_points"] else "",
            number(row["paper_latency_ms"], 0),
            number(row["paper_req_per_s"], 0),
            f"{row['paper_gain_points']:+.0f}" if row["paper_gain_points"] else "",
        ]
        for row in result["rows"]
    ]
    header = ["", "ms", "req/s", "points", "paper: ms", "paper: req/s", "paper: points"]
    return f"{markdown_table(header, lines)}\n\n{source(result)}"


def kernels_table(result: Result) -> str:
    """Each operation at its longest shape, and how it fares at all shapes against the fastest library there."""
    operations: dict[str, list[Row]] = {}
    for row in result["rows"]:
        operations.setdefault(row["op"], []).append(row)
    lines = []
    for op, rows in operations.items():
        fastest = list(_fastest_baselines(rows))
        largest = max(fastest, key=lambda row: row["us"])
        ratios = [row["ratio"] for row in fastest]
        lines.append(
            [
                op.replace("_", " "),
                largest["shape"],
                f"{largest['us']:.1f}",
                number(largest["tflops"] or None, 0),
                number(largest["gb_per_s"], 0),
                f"{largest['baseline']}, {largest['baseline_us']:.1f} us",
                f"{largest['ratio']:.2f}x",
                f"{min(ratios):.2f}x to {max(ratios):.2f}x ({len(fastest)})",
            ]
        )
    header = [
        "operation",
        "longest shape",
        "us",
        "TFLOP/s",
        "GB/s",
        "fastest other",
        "speedup",
        "at all shapes (how many)",
    ]
    return f"{markdown_table(header, lines)}\n\n{source(result)}"


def top_k_table(result: Result) -> str:
    """Each shape beside every library."""
    times: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        if row["op"] == "radix_topk":
            times.setdefault(row["shape"], {"ours": row["us"]})[row["baseline"]] = row["baseline_us"]
    libraries = list(dict.fromkeys(name for row in times.values() for name in row if name != "ours"))
    lines = [
        [
            shape,
            f"{row['ours']:.1f}",
            *(text for name in libraries for text in (number(row.get(name), 0), ratio(row.get(name), row["ours"]))),
        ]
        for shape, row in times.items()
    ]
    header = [
        "exact, sorted top-k of float32",
        "us",
        *(text for name in libraries for text in (f"{name}, us", "speedup")),
    ]
    return f"{markdown_table(header, lines)}\n\n{source(result)}" if lines else ""


def moe_table(result: Result) -> str:
    """The whole MoE block, router to combination, in both precisions."""
    blocks = {row["shape"]: row for row in result["rows"] if row["op"] == "moe_block"}
    lines = []
    for shape, fp8 in blocks.items():
        tokens, _, recipe = shape.rpartition(", ")
        if recipe == "fp8_block":
            bf16 = blocks[f"{tokens}, bf16"]
            times = [f"{bf16['us']:.1f}", f"{bf16['tflops']:.0f}", f"{fp8['us']:.1f}", f"{fp8['tflops']:.0f}"]
            eager = ratio(bf16["baseline_us"], bf16["us"])
            lines.append([tokens, *times, ratio(bf16["us"], fp8["us"]), eager])
    header = [
        "MoE block",
        "BF16, us",
        "TFLOP/s",
        "FP8, us",
        "TFLOP/s",
        "FP8 over BF16",
        "BF16 over torch's grouped GEMM",
    ]
    return f"{markdown_table(header, lines)}\n\n{source(result)}" if lines else ""


def attention_table(result: Result) -> str:
    """Each shape in both precisions, beside the fastest library in BF16."""
    times: dict[str, dict[str, Row]] = {}
    for row in _fastest_baselines([row for row in result["rows"] if row["op"] == "beam_attention"]):
        shape, _, precision = row["shape"].rpartition(" ")
        times.setdefault(shape, {})[precision] = row
    lines = []
    for shape, row in times.items():
        pair = [row[precision] for precision in ("BF16", "FP8")]
        ours = [text for one in pair for text in (f"{one['us']:.1f}", f"{one['tflops']:.0f}")]
        lines.append([shape, *ours, f"{pair[0]['baseline']}, {pair[0]['baseline_us']:.1f}"])
    header = ["beam attention, 11 heads of 128", "BF16, us", "TFLOP/s", "FP8, us", "TFLOP/s", "fastest other, us"]
    return f"{markdown_table(header, lines)}\n\n{source(result)}" if lines else ""


def _fastest_baselines(rows: list[Row]) -> Iterable[Row]:
    """Of the rows of each shape, the one beside the fastest library."""
    shapes: dict[str, Row] = {}
    for row in rows:
        known = shapes.get(row["shape"])
        if known is None or row["baseline_us"] < known["baseline_us"]:
            shapes[row["shape"]] = row
    return shapes.values()


GPU_TABLES: dict[str, Callable[[Result], str]] = {
    "engine": engine_table,
    "ablation": ablation_table,
    "agreement": agreement_table,
    "serving": serving_table,
    "kernels": kernels_table,
}
"""By the name of the marker and of the result file."""
KERNEL_TABLES: dict[str, Callable[[Result], str]] = {
    "top_k": top_k_table,
    "moe": moe_table,
    "attention": attention_table,
}
"""By the name of the marker: further tables of the kernels' result file."""


def gpu_tables(directory: Path) -> dict[str, str]:
    """The tables of the result files that are there."""
    sources = {name: (f"{name}.json", table) for name, table in GPU_TABLES.items()}
    sources |= {name: ("kernels.json", table) for name, table in KERNEL_TABLES.items()}
    return {
        name: table(json.loads((directory / path).read_text()))
        for name, (path, table) in sources.items()
        if (directory / path).is_file()
    }
