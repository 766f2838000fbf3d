"""How long a catalog file takes to compile, and how much memory, in a process of its own.

python -m benchmarks.catalog --out benchmarks/results/catalog.json [--items 1000000 ...]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import ROOT, describe_environment
from benchmarks.results import ResultFile
from loka_serve.catalog.readers import read_catalog
from loka_serve.command_line import CommandParser, output_file, positive, run_command_line

CODES = 8192
LEVELS = 3
KINDS = 40


def write_items(path: Path, items: int, seed: int = 0) -> None:
    """JSON lines of distinct items with a popularity, a kind and a price; some share their semantic ID."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, CODES, (items, LEVELS))
    codes[::50] = codes[0]
    kinds, prices = generator.integers(0, KINDS, items), generator.random(items) * 100
    with path.open("w") as file:
        for index in range(items):
            row = {
                "item_id": f"item-{index}",
                "semantic_id": codes[index].tolist(),
                "popularity": float(items - index),
                "kind": f"kind-{kinds[index]}",
                "price": round(float(prices[index]), 2),
            }
            file.write(json.dumps(row) + "\n")


def compile_here(path: Path, compiled: Path) -> dict[str, Any]:
    """Read, compile and save a catalog in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    catalog = read_catalog(path, (CODES,) * LEVELS)
    seconds = time.perf_counter() - started
    catalog.save(compiled)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "items": catalog.item_count,
        "file_mib": round(path.stat().st_size / 2**20, 1),
        "compile_seconds": round(seconds, 2),
        "save_seconds": round(time.perf_counter() - started - seconds, 2),
        "peak_rss_mib": round(peak / 1024, 1),
        "rss_before_mib": round(before / 1024, 1),
        "compiled_mib": round(compiled.stat().st_size / 2**20, 1),
    }


def measure(items: int) -> dict[str, Any]:
    """A row of the result: one catalog, compiled by a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path, compiled = Path(folder) / "items.jsonl", Path(folder) / "catalog.safetensors"
        write_items(path, items)
        command = [sys.executable, "-m", "benchmarks.catalog", "--compile", str(path), str(compiled)]
        row: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return row


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file)
    parser.add_argument("--items", type=positive, nargs="+", default=[1_000_000])
    parser.add_argument("--compile", type=Path, nargs=2, metavar=("FILE", "COMPILED"), help="compile one file here")
    arguments = parser.parse_args()
    if arguments.compile:
        print(json.dumps(compile_here(*arguments.compile)))
        return
    if arguments.out is None:
        parser.error("the following arguments are required: --out")
    result = ResultFile(arguments.out, {"environment": describe_environment()})
    for items in arguments.items:
        result.add(measure(items))
        print(result.rows[-1], flush=True)


if __name__ == "__main__":
    run_command_line(main)
