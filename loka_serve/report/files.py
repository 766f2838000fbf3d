"""Writes ``report.json`` and ``report.html`` from the files of a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loka_serve.bundle import DISPATCH_FILE
from loka_serve.errors import BundleError
from loka_serve.report.content import gather
from loka_serve.report.page import render

REPORT_FILE, PAGE_FILE = "report.json", "report.html"
COMPARISON_FILE, ENGINES_FILE = "comparison.json", "engines.json"


def report_files(directory: Path, model_name: str, engine: str, dispatch: Path | None = None) -> dict[str, bytes]:
    """The report of the bundle in `directory`: its two files by name.

    Args:
        dispatch: a dispatch table that was measured for the bundle; without one the bundle's own, if it has any.

    Raises:
        BundleError: names a file that cannot be read or lacks what a report needs.
    """
    own = directory / DISPATCH_FILE
    table = dispatch or (own if own.exists() else None)
    comparison, engines = directory / COMPARISON_FILE, directory / ENGINES_FILE
    try:
        report = gather(
            model_name,
            engine,
            _read(directory / "probe.json"),
            _read(directory / "gate.json"),
            _read(comparison) if comparison.exists() else None,
            None if table is None else _read(table),
            _read(engines) if engines.exists() else None,
        )
        page = render(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{directory}: the evidence is not as the build writes it: {error!r}") from error
    return {REPORT_FILE: (json.dumps(report, indent=1, allow_nan=False) + "\n").encode(), PAGE_FILE: page.encode()}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise BundleError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values
