"""Measure which library and recipe runs each site of a model fastest within bounds of error, or show what was measured.

python -m loka_serve.dispatch measure --preset onerec-v2-4b-a0.5b --out dispatch.json
python -m loka_serve.dispatch measure --bundle bundle/
python -m loka_serve.dispatch show bundle/

With --preset or --checkpoint every recipe is measured, and python -m loka_serve.build --dispatch FILE takes the table
into account. A bundle holds each weight in one recipe, so its engine chooses among that recipe's implementations alone.
--bundle writes the table into the bundle, where serve reads it and, with --frozen-dispatch, insists on it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from loka_serve.bundle import DISPATCH_FILE, Bundle, add_files
from loka_serve.command_line import CommandParser, duration, output_file, positive, run_command_line, usable_device
from loka_serve.dispatch.sites import ROWS, Work, names_of_work, shapes_to_measure, work_of_sites
from loka_serve.dispatch.table import DispatchError, format_rows, read_table, rows_of
from loka_serve.engines.hopper.tuning import ROW_GRID
from loka_serve.kernels.dispatch import Dispatch, Shape
from loka_serve.kernels.linear.adapters import ADAPTERS
from loka_serve.kernels.linear.adapters.flashinfer import FlashInfer
from loka_serve.kernels.linear.implementations import MEASURED_RECIPES
from loka_serve.models.checkpoint import load_config
from loka_serve.models.config import PRESETS
from loka_serve.report.files import report_files


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises LokaError for what the user can mend."""
    parser = CommandParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    show = commands.add_parser("show", help="print a table")
    show.add_argument("path", type=Path, help="a dispatch table, or a bundle that has one")
    show.add_argument("--json", action="store_true", help="one JSON object a line, with the reason of each choice")
    measure = commands.add_parser("measure", help="time every candidate on this machine's GPU")
    target = measure.add_mutually_exclusive_group(required=True)
    target.add_argument("--preset", choices=list(PRESETS), help="shapes of a preset")
    target.add_argument("--checkpoint", type=Path, help="shapes of a checkpoint")
    target.add_argument("--bundle", type=Path, help="shapes of a bundle, which the table is written into")
    measure.add_argument("--out", type=output_file, help="the file to write; not with --bundle")
    measure.add_argument(
        "--rows", type=positive, nargs="+", help=f"numbers of rows (default: {' '.join(map(str, ROWS))})"
    )
    measure.add_argument("--recipes", nargs="+", choices=MEASURED_RECIPES, default=list(MEASURED_RECIPES))
    measure.add_argument("--device", type=usable_device, help="cuda (the default) or cuda:N")
    measure.add_argument("--seconds", type=duration, help="stop after so long; the shapes left are not in the table")
    measure.add_argument("--build-libraries", action="store_true", help="let FlashInfer compile its GEMMs, for minutes")
    options = parser.parse_args(arguments)
    if options.command == "show":
        _show(options)
    else:
        _measure(options)


class _Parser(CommandParser):
    """Of a subcommand, which argparse gives arguments of its own."""

    def __init__(self, **options: str) -> None:
        super().__init__(None)
        self.prog = options["prog"]


def _show(options: argparse.Namespace) -> None:
    table = read_table(options.path)
    if options.json:
        print("\n".join(json.dumps(row.to_dict()) for row in rows_of(table)))
    else:
        print(format_rows(table))


def _measure(options: argparse.Namespace) -> None:
    if (options.out is None) == (options.bundle is None):
        raise DispatchError("--out: expected a file with --preset or --checkpoint, and none with --bundle")
    works, shapes, bundle = _work(options)
    device = options.device or "cuda"
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        here = "" if torch.cuda.is_available() else ", and none is here"
        raise DispatchError(f"--device {device}: dispatch is measured on a CUDA device{here}")
    if options.build_libraries:
        _build_libraries()
    table = measure_with_bar(shapes, device, options.seconds)
    table = replace(table, sites={work.key: name for work, name in works.items()})
    if bundle is None:
        written = options.out
        written.parent.mkdir(parents=True, exist_ok=True)
        table.save(written)
    else:
        written = bundle.path / DISPATCH_FILE
        add_files(bundle.path, {DISPATCH_FILE: table.text().encode()})
        add_files(bundle.path, report_files(bundle.path, bundle.model_name, bundle.engine))
    left = len(shapes) - len(table.entries)
    missing = f"; {left} of {len(shapes)} were not measured" if left else ""
    print(f"{written}: {len(table.entries)} shapes in their recipes{missing}")


def _work(options: argparse.Namespace) -> tuple[dict[Work, str], list[Shape], Bundle | None]:
    """What is measured, under the names of the sites."""
    if options.bundle is None:
        config = PRESETS[options.preset] if options.preset else load_config(options.checkpoint)
        works = names_of_work(work_of_sites(config))
        return works, shapes_to_measure(works, options.rows or ROWS, options.recipes), None
    bundle = Bundle.load(options.bundle, verify=False)
    sites = work_of_sites(bundle.config)
    for name, recipe in bundle.plan.recipes.items():
        if name.endswith(".router") and recipe != "bf16":
            sites[name] = Work("linear_float32", bundle.config.experts, bundle.config.d_model)
    works = names_of_work(sites)
    return works, shapes_to_measure(works, options.rows or ROW_GRID, options.recipes), bundle


def measure_with_bar(shapes: Sequence[Shape], device: str, seconds: float | None) -> Dispatch:
    """Measures, with a bar on a terminal; shapes that are left after so many seconds are left out."""
    end = None if seconds is None else time.monotonic() + seconds

    def enough() -> bool:
        return end is not None and time.monotonic() > end

    hidden = not sys.stderr.isatty()
    with tqdm(total=len(shapes), desc="dispatch", disable=hidden, file=sys.stderr) as bar:
        return Dispatch.measure(shapes, device, bar.update, enough)


def _build_libraries() -> None:
    for adapter in ADAPTERS:
        if isinstance(adapter, FlashInfer):
            try:
                adapter.build()
            except RuntimeError as error:
                raise DispatchError(f"--build-libraries: {str(error).splitlines()[0]}") from error


if __name__ == "__main__":
    run_command_line(main)
