"""Which library and recipe dispatch picks at the shapes of a preset, and whether a second measurement agrees.

python -m benchmarks.dispatch --out benchmarks/results/h200/dispatch.json [--budget 110] [--rows 8 512 4096]

Each cell (the sites of one shape, at so many rows) is measured, decided by the rule, and later measured again: `again`
has the choice's time then, the best time then of what the rule allowed, and their ratio. Workers first compile what
will be measured, so that no time of the budget passes with fifteen of sixteen cores idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.environment import describe_environment
from loka_serve.command_line import CommandParser, duration, not_negative, output_file, positive, run_command_line
from loka_serve.dispatch.sites import Work, names_of_work, shapes_to_measure, work_of_sites
from loka_serve.dispatch.table import row_of
from loka_serve.errors import LokaError
from loka_serve.kernels.dispatch import EXPERTS, OUT_DTYPES, Cell, Dispatch, Shape
from loka_serve.kernels.dispatch_environment import libraries_here
from loka_serve.kernels.dispatch_rule import BASELINE, Candidate, decide, objection
from loka_serve.kernels.linear.implementations import RECIPES, implementations_for
from loka_serve.kernels.linear.workload import Workload
from loka_serve.models.config import PRESETS

PRESET = "onerec-v2-4b-a0.5b"
DEFAULT_ROWS = (4096, 512, 16384, 8, 1, 2048, 128, 8192, 32, 1024)  # what matters most first, should time run out
CLOSE = 1.03
FIRST_SHARE = 0.6
"""Of what is left of the budget after compiling, for the first measurement; the second skips what lost by far."""


@dataclass(frozen=True)
class Measured:
    """A cell, its candidates of both measurements, fastest first, and how many sites of the model run it."""

    cell: Cell
    sites: int
    first: Sequence[Candidate]
    second: Sequence[Candidate] = ()


def record_of(measured: Measured, names: Mapping[tuple[str, int, int, int], str]) -> dict[str, Any]:
    """One row of the result."""
    table = Dispatch.unmeasured("cpu")
    row = row_of(replace(table, sites=names), measured.cell, measured.first).to_dict()
    candidates = [
        {"implementation": it.implementation, "library": it.library, "recipe": it.recipe, "us": it.us, "mere": it.mere}
        for it in measured.first
    ]
    return {**row, "sites": measured.sites, "again": again(measured), "candidates": candidates}


def again(measured: Measured) -> dict[str, Any] | None:
    """What the second measurement says of the first one's choice; None where there was none.

    `best` is the fastest of what the rule allowed at first: whatever the second says of a gain near 1.05, a recipe that
    was refused at first is no candidate.
    """
    decision = decide(measured.first)
    allowed = {
        (it.implementation, it.recipe)
        for it in measured.first
        if it.recipe == BASELINE or (it.recipe in RECIPES and not objection(it, decision.bf16_us))
    }
    times = {(it.implementation, it.recipe): it.us for it in measured.second}
    choice = (decision.choice.implementation, decision.choice.recipe)
    if choice not in times:
        return None
    best = min((key for key in times if key in allowed), key=times.__getitem__)
    ratio = times[choice] / times[best]
    return {
        "us": times[choice],
        "best": " ".join(best),
        "best_us": times[best],
        "ratio": round(ratio, 4),
        "close": ratio <= CLOSE,
    }


def summary_of(cells: Sequence[Measured]) -> dict[str, Any]:
    """Agreement of the two measurements, who wins where, and what one library alone would take."""
    said = [found for measured in cells if (found := again(measured)) is not None]
    wins = Counter(decide(measured.first).choice.library for measured in cells)
    recipes = Counter(decide(measured.first).choice.recipe for measured in cells)
    return {
        "cells": len(cells),
        "measured_again": len(said),
        "within_3_percent": sum(found["close"] for found in said),
        "worst_ratio": max((found["ratio"] for found in said), default=None),
        "wins_by_library": dict(wins.most_common()),
        "wins_by_recipe": dict(recipes.most_common()),
        "by_rows": _by_rows(cells),
    }


def _by_rows(cells: Sequence[Measured]) -> list[dict[str, Any]]:
    """Microseconds of all GEMMs of the model at so many rows, by dispatch and by the best library alone."""
    rows = []
    for count in sorted({measured.cell[-1] for measured in cells}):
        here = [measured for measured in cells if measured.cell[-1] == count]
        alone = {library: _total(here, library) for library in _libraries(here)}
        best = min(alone, key=alone.__getitem__)
        rows.append(
            {
                "rows": count,
                "dispatch_us": round(_total(here, None), 2),
                "best_alone": best,
                "best_alone_us": round(alone[best], 2),
                "bf16_us": round(sum(it.sites * (decide(it.first).bf16_us or 0.0) for it in here), 2),
            }
        )
    return rows


def _libraries(cells: Iterable[Measured]) -> set[str]:
    return {it.library for measured in cells for it in measured.first if "+" not in it.library}


def _total(cells: Iterable[Measured], library: str | None) -> float:
    """Time of these cells, each as often as the model has it; with one library alone, what it lacks runs in BF16."""
    total = 0.0
    for measured in cells:
        own = [it for it in measured.first if library in (None, it.library) or it.recipe == BASELINE]
        total += measured.sites * decide(own).choice.us
    return total


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--preset", choices=list(PRESETS), default=PRESET)
    parser.add_argument("--rows", type=positive, nargs="+", default=list(DEFAULT_ROWS))
    parser.add_argument("--budget", type=duration, default=110.0, help="seconds for all, compiling included")
    parser.add_argument("--workers", type=not_negative, default=8, help="processes that compile first; 0 for none")
    parser.add_argument("--commit", help="what the result says it was measured at; by default git is asked")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a worker: i/n
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise LokaError("dispatch is measured on a CUDA device, and none is here")
    started = time.monotonic()
    sites = work_of_sites(PRESETS[arguments.preset])
    if arguments.part is not None:
        compile_part(sites, arguments.rows, arguments.part, started + arguments.budget)
        return
    if arguments.workers:
        _compile(arguments, arguments.budget / 2)
    content: dict[str, Any] = {
        "environment": describe_environment(arguments.commit),
        "libraries": dict(libraries_here()),
        "seconds": {"compiling": round(time.monotonic() - started, 1)},
    }
    cells, skipped = measure_twice(sites, arguments.rows, started + arguments.budget)
    names = {work.key: name for work, name in names_of_work(sites).items()}
    content["seconds"]["all"] = round(time.monotonic() - started, 1)
    content["summary"] = {**summary_of(cells), "skipped": skipped}
    content["rows"] = [record_of(measured, names) for measured in sorted(cells, key=lambda it: it.cell)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps({**content["summary"], "seconds": content["seconds"]}))


def measure_twice(
    sites: Mapping[str, Work], rows: Sequence[int], end: float
) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Both measurements of every cell that there is time for, and the cells that there was none for."""
    works = Counter(_gemms(sites))
    todo = [(work, count) for count in rows for work in works]
    first_end = time.monotonic() + FIRST_SHARE * (end - time.monotonic())
    cells: dict[tuple[Work, int], Measured] = {}
    for work, count in todo:
        if time.monotonic() > first_end:
            break
        for cell, found in Dispatch.measure(shapes_to_measure([work], [count]), "cuda").cells().items():
            cells[work, count] = Measured(cell, works[work], found)
            print(describe(cells[work, count]), flush=True)
    for key, measured in cells.items():
        if time.monotonic() > end:
            break
        work, count = key
        recipes = {it.recipe for it in measured.first if it.us <= 1.2 * decide(measured.first).choice.us} | {BASELINE}
        shapes = shapes_to_measure([work], [count], sorted(recipes & set(RECIPES)))
        for found in Dispatch.measure(shapes, "cuda").cells().values():
            cells[key] = replace(measured, second=found)
    left = [(work, count) for work, count in todo if (work, count) not in cells]
    skipped = [{"op": work.op, "n": work.n, "k": work.k, "rows": count} for work, count in left]
    return list(cells.values()), skipped


def _gemms(sites: Mapping[str, Work]) -> list[Work]:
    """The work of each launch: experts once a layer, though two sites or four share it."""
    return [work for name, work in sites.items() if work.op != EXPERTS or name.endswith(".moe.gate_up")]


def describe(measured: Measured) -> str:
    """One line for the terminal."""
    row = row_of(Dispatch.unmeasured("cpu"), measured.cell, measured.first)
    return f"{row.site}, {row.rows} rows: {row.choice}, {row.recipe}, {row.us} us, BF16 {row.bf16_us} us; {row.reason}"


def _compile(arguments: argparse.Namespace, seconds: float) -> None:
    """Fills the compilers' caches on disk, in processes beside each other; what they leave is compiled later."""
    command = [sys.executable, "-m", "benchmarks.dispatch", "--out", str(arguments.out), "--preset", arguments.preset]
    command += ["--budget", str(seconds), "--rows", *map(str, arguments.rows)]
    workers = [
        subprocess.Popen([*command, "--part", f"{part}/{arguments.workers}"], stdout=subprocess.DEVNULL)
        for part in range(arguments.workers)
    ]
    end = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def compile_part(sites: Mapping[str, Work], rows: Sequence[int], part: str, end: float) -> None:
    """Runs every n-th combination once, from the i-th, untimed."""
    index, parts = (int(text) for text in part.split("/"))
    for shape, names in list(_kinds(sites, rows))[index::parts]:
        if time.monotonic() > end:
            return
        if shape.op == EXPERTS:
            Dispatch.measure([shape], "cuda")
            continue
        workload = Workload(shape.recipe, shape.rows, shape.n, shape.k, "cuda", copies=1)
        for name in names:
            workload.time(name, OUT_DTYPES[shape.op], repeats=1)


def _kinds(sites: Mapping[str, Work], rows: Sequence[int]) -> Iterable[tuple[Shape, list[str]]]:
    """What compiles anew: Triton for a tiling, a recipe and an inner width, the libraries perhaps for every shape."""
    seen = set()
    for shape in shapes_to_measure(dict.fromkeys(_gemms(sites)), rows):
        if shape.op == EXPERTS:
            if shape.rows in (8, 512, 16384):  # one for each tiling of the tables
                yield shape, []
            continue
        names = implementations_for(shape.recipe, shape.rows, shape.n, shape.k, "cuda", OUT_DTYPES[shape.op])
        kinds = {
            name: (name, shape.recipe, shape.op, shape.k, *(() if name.startswith("triton") else (shape.n, shape.rows)))
            for name in names
            if not name.startswith("torch")
        }
        new = [name for name, kind in kinds.items() if kind not in seen]
        seen.update(kinds.values())
        if new:
            yield shape, new


if __name__ == "__main__":
    run_command_line(main)
