"""Writes the README's tables from committed results, so that no figure there is typed by hand.

python -m benchmarks.readme_tables [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown_table
from benchmarks.readme_gpu_tables import GPU_TABLES, gpu_tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GROCERIES = ROOT / "examples" / "groceries" / "results.json"
BEAUTY = ROOT / "examples" / "beauty" / "results.json"
BEAUTY_METRICS = ("recall@10", "ndcg@10")
RESULTS = ROOT / "benchmarks" / "results"
GPU_RESULTS = RESULTS / "h200"
COMPARED = ("groceries", "beauty")


def groceries_table() -> str:
    results: dict[str, Any] = json.loads(GROCERIES.read_text())
    names = {
        "ours": "OneRec-V2, sparse MoE (this repository)",
        "blend": "blend of the three below",
        "markov": "first-order Markov",
        "own_repeat": "the household's own top products",
        "popularity": "popularity",
    }
    rows = [
        [
            name,
            *(f"{results[key][metric]:.3f}" for metric in ("hr@10", "ndcg@10")),
            *(f"{results[key]['random_order'][metric]:.3f}" for metric in ("hr@10", "ndcg@10")),
        ]
        for key, name in names.items()
    ]
    header = [
        "next item, all positions of the last basket",
        "HR@10",
        "NDCG@10",
        "HR@10, random order",
        "NDCG@10, random order",
    ]
    basket = results["last_basket"]
    basket_rows = [
        [key.replace("_", " "), f"{values['recall@10']:.3f}", f"{values['ndcg@10']:.3f}"]
        for key, values in basket.items()
    ]
    basket_table = markdown_table(["last basket as a set", "Recall@10", "NDCG@10"], basket_rows)
    return f"{markdown_table(header, rows)}\n\n{basket_table}"


def fp8_table() -> str:
    figures: dict[str, float] = json.loads(GROCERIES.read_text())["fp8_vs_bf16"]
    rows = [
        ["HR@10, relative change", f"{100 * figures['hr@10_relative_change']:+.2f} %"],
        ["overlap of the top 50", f"{figures['top50_overlap']:.3f}"],
        ["bytes of the quantized weights", f"{figures['weight_bytes_ratio']:.2f}x"],
    ]
    return markdown_table(["FP8 against BF16", ""], rows)


def comparison_table() -> str:
    """What `build --compare` finds on the two trained checkpoints, the recipes side by side."""
    lines = []
    for name in COMPARED:
        measured: dict[str, Any] = json.loads((RESULTS / f"comparison_{name}.json").read_text())
        for row in measured["comparison"]["rows"]:
            gate = row["gate"]
            recall, ndcg = gate["quality"]["recall@10"], gate["quality"]["ndcg@10"]
            low, high = recall["change_interval"]
            lines.append(
                [
                    f"{name}, {measured['held_out_histories']:,} histories",
                    row["recipe"],
                    f"{gate['top_k_overlap']:.3f}",
                    f"{recall['quantized']:.4f}",
                    f"{100 * (recall['quantized'] / recall['bf16'] - 1):+.2f} %",
                    f"{low:+.4f} to {high:+.4f}",
                    f"{ndcg['quantized']:.4f}",
                    f"{gate['calibration']['expected_calibration_error']['quantized']:.4f}",
                    f"{row['weight_bytes'] / 2**20:.1f}",
                ]
            )
    header = [
        "checkpoint",
        "recipe",
        "top-50 overlap",
        "Recall@10",
        "change",
        "95 % of the change",
        "NDCG@10",
        "calibration error",
        "weights, MiB",
    ]
    return markdown_table(header, lines)


def beauty_table() -> str:
    results: dict[str, Any] = json.loads(BEAUTY.read_text())
    rows = {
        "OneRec-V2, sparse MoE, 1.4 M parameters (this repository)": results["ours"],
        "windowed co-occurrence": results["baselines"]["co_occurrence"],
        "popularity": results["baselines"]["popularity"],
    }
    lines = [
        [name, *(f"{values[mode][metric]:.4f}" for mode in ("plain", "history_excluded") for metric in BEAUTY_METRICS)]
        for name, values in rows.items()
    ]
    lines += [
        [f"{name}, published", f"{value:.4f}", "", "", ""] for name, value in results["published_recall@10"].items()
    ]
    header = ["next item, all users", "Recall@10", "NDCG@10", "history excluded: Recall@10", "NDCG@10"]
    return markdown_table(header, lines)


def reliability_table() -> str:
    """Each promise with what was measured; figures with a bar name it."""
    rows = json.loads((RESULTS / "reliability.json").read_text())["rows"]
    lines = [
        [row["title"], "; ".join(_figure(figure) for figure in row["figures"]), "yes" if row["held"] else "**no**"]
        for row in rows
    ]
    return markdown_table(["under this", "measured (bar)", "held"], lines)


def _figure(figure: dict[str, Any]) -> str:
    least, most = figure["least"], figure["most"]
    bars = [f"at least {least:g}"] if least is not None and least != most else []
    bars += [f"at most {most:g}"] if most is not None and least != most else []
    bars += [f"exactly {most:g}"] if most is not None and least == most else []
    value = "nothing" if figure["value"] is None else f"{round(figure['value'], 2):,g}"
    unit = f" {figure['unit']}" if figure["unit"] else ""
    return f"{figure['name']} {value}{unit}" + (f" ({', '.join(bars)})" if bars else "")


TABLES: dict[str, Callable[[], str]] = {
    "groceries": groceries_table,
    "fp8": fp8_table,
    "beauty": beauty_table,
    "comparison": comparison_table,
    "reliability": reliability_table,
}


def render(readme: str, gpu_results: Path = GPU_RESULTS) -> str:
    """The README with every marked table written afresh; one whose GPU result is not there stays as it is.

    Raises:
        KeyError: a marker without a table.
    """
    measured = gpu_tables(gpu_results)

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name in GPU_TABLES and name not in measured:
            return match[0]
        text = measured[name] if name in measured else TABLES[name]()
        return f"<!-- table: {name} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, readme, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if the README differs from the results")
    check = parser.parse_args().check
    current = README.read_text()
    updated = render(current)
    if check and updated != current:
        sys.exit("README.md differs from the committed results: run python -m benchmarks.readme_tables")
    if not check:
        README.write_text(updated)


if __name__ == "__main__":
    main()
