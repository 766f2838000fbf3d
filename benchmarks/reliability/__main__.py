"""Runs the cases of the reliability table against real servers on this machine, and writes what was measured.

python -m benchmarks.reliability [--out benchmarks/results/reliability.json] [--only CASE ...] [--slow] [--quick]

Rows of cases that are not run are kept. Exit code 1 if a case did not hold.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environment import ROOT, describe_environment
from benchmarks.reliability import cases
from benchmarks.reliability.case import Case, Figure, Setting
from loka_serve.command_line import CommandParser, output_file, run_command_line

RESULT = ROOT / "benchmarks" / "results" / "reliability.json"


def find_cases() -> dict[str, Case]:
    """All cases by name, in the order of their modules' names."""
    found: dict[str, Case] = {}
    for module in sorted(pkgutil.iter_modules(cases.__path__), key=lambda module: module.name):
        for case in importlib.import_module(f"{cases.__name__}.{module.name}").CASES:
            if case.name in found:
                raise ValueError(f"two cases are named {case.name}")
            found[case.name] = case
    return found


def run_case(case: Case, quick: bool, work_dir: Path) -> dict[str, Any]:
    """The row of a case: its figures, each with its bar, and whether all are within."""
    started = time.monotonic()
    error = None
    figures: Sequence[Figure] = ()
    with tempfile.TemporaryDirectory(prefix="loka-reliability-") as scratch:
        try:
            figures = case.run(Setting(quick, Path(scratch), work_dir))
        except Exception as problem:
            traceback.print_exc()
            error = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
    return {
        "case": case.name,
        "title": case.title,
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "figures": [
            {
                "name": figure.name,
                "value": figure.value if figure.value is None else round(float(figure.value), 4),
                "unit": figure.unit,
                "least": figure.least,
                "most": figure.most,
                "held": figure.held,
            }
            for figure in figures
        ],
        "error": error,
        "held": error is None and bool(figures) and all(figure.held for figure in figures),
    }


def write_row(path: Path, row: dict[str, Any], order: Sequence[str]) -> None:
    """Put a row into the result file in place of the earlier one of its case; rows of cases that are no more go."""
    rows = {old["case"]: old for old in json.loads(path.read_text())["rows"]} if path.is_file() else {}
    rows[row["case"]] = row
    ordered = [rows[name] for name in order if name in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """What a row is to say about where it was measured."""
    described = describe_environment()
    return {
        "cpu_cores": psutil.cpu_count(),
        "machine": platform.machine(),
        **{name: described[name] for name in ("gpu", "python", "libraries", "commit", "command")},
    }


def shown(row: dict[str, Any]) -> str:
    """One line on a row."""
    figures = ", ".join(f"{figure['name']} {figure['value']}{figure['unit']}" for figure in row["figures"])
    return f"{'held' if row['held'] else 'NOT HELD'}  {row['case']}  ({row['seconds']} s)  {figures or row['error']}"


def main() -> None:
    known = find_cases()
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, default=RESULT)
    parser.add_argument("--only", nargs="+", choices=sorted(known), metavar="CASE", help=f"of {', '.join(known)}")
    parser.add_argument("--slow", action="store_true", help="the soak too, which takes half an hour")
    parser.add_argument("--quick", action="store_true", help="a few seconds a case: to try it, not to publish")
    parser.add_argument("--work-dir", type=Path, default=ROOT / ".demo", help="the groceries' data and bundle")
    options = parser.parse_args()
    chosen = [known[name] for name in options.only] if options.only else list(known.values())
    where = environment()
    rows = []
    for case in chosen:
        if case.slow and not (options.slow or options.only):
            continue
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        rows.append({**run_case(case, options.quick, options.work_dir), "environment": where})
        write_row(options.out, rows[-1], list(known))
        print(shown(rows[-1]), flush=True)
    raise SystemExit(0 if all(row["held"] for row in rows) else 1)


if __name__ == "__main__":
    run_command_line(main)
