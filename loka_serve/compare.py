"""`--compare` of the build: every recipe on the same held-out histories, in quality, bytes and time, in one table."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from loka_serve.build_config import BuildConfig
from loka_serve.bundle import Bundle, staging_directory
from loka_serve.engines import load_engine
from loka_serve.engines.base import EngineLimits, EngineRequest, RequestBatch
from loka_serve.errors import BundleError, EngineError
from loka_serve.gate import GateResult
from loka_serve.probe.report import SiteReport, format_bytes
from loka_serve.probe.run import AUTO
from loka_serve.quantization.plan import RECIPE_NAMES

RECIPES = (*RECIPE_NAMES, AUTO)
COMPARED_KS = (5, 10, 50)
TIMED_SECONDS = 1.0


class Outcome(Protocol):
    """What a build gives, as far as it is compared."""

    @property
    def path(self) -> Path: ...

    @property
    def sites(self) -> list[SiteReport]: ...

    @property
    def gate(self) -> GateResult: ...


@dataclass(frozen=True)
class Row:
    """One recipe.

    Attributes:
        weight_bytes: of all sites' weights, scales included.
        milliseconds_per_history: None where the engine does not run the recipe.
        not_timed: then why.
    """

    recipe: str
    gate: GateResult
    weight_bytes: int
    milliseconds_per_history: float | None
    not_timed: str = ""


def compare_others(
    config: BuildConfig,
    limits: EngineLimits,
    requests: Sequence[EngineRequest],
    build: Callable[[BuildConfig], Outcome],
    device: torch.device,
) -> list[Row]:
    """Build, measure and remove a bundle of each recipe but the one that `config` asks for.

    The reference engine judges quality, whichever engine the bundle is for, so that every recipe has figures; time is
    that of `config.engine`.

    Args:
        limits: of the engine that is timed.
        requests: held-out histories to time.
        build: as `loka_serve.build.build`.

    Raises:
        LokaError: a recipe cannot be built; names what is at fault.
    """
    rows = []
    with staging_directory(config.out.with_name(f"{config.out.name}.compare")) as folder:
        for recipe in RECIPES:
            if recipe == config.recipe:
                continue
            one = replace(
                config,
                recipe=recipe,
                out=folder / recipe,
                engine="reference",
                min_top_k_overlap=0.0,
                compare=False,
                probe_pairs=0,  # the sites' own figures are those of the bundle itself
                probe_cost_rows=0,
            )
            outcome = build(one)
            rows.append(
                measure(recipe, outcome.path, outcome.sites, outcome.gate, config.engine, limits, requests, device)
            )
            shutil.rmtree(outcome.path)
    return rows


def measure(
    recipe: str,
    bundle: Path,
    sites: Sequence[SiteReport],
    gate: GateResult,
    engine: str,
    limits: EngineLimits,
    requests: Sequence[EngineRequest],
    device: torch.device,
) -> Row:
    """The row of a bundle; its time on an engine that does not run its recipe is left out, with the reason."""
    stored = sum(site.weight_bytes for site in sites)
    try:
        seconds = seconds_per_history(bundle, engine, limits, requests, device)
    except (EngineError, BundleError) as error:
        return Row(recipe, gate, stored, None, str(error))
    return Row(recipe, gate, stored, 1000 * seconds)


def seconds_per_history(
    bundle: Path, engine: str, limits: EngineLimits, requests: Sequence[EngineRequest], device: torch.device
) -> float:
    """Time of all histories in batches of `limits.batch`, over their number; after a warm-up, for about a second.

    Raises:
        EngineError: the engine does not run the bundle.
    """
    running = load_engine(Bundle.load(bundle, verify=False), engine, str(device), limits)
    running.warmup()
    size = limits.batch
    batches = [RequestBatch(tuple(requests[start : start + size])) for start in range(0, len(requests), size)]
    running.recommend(batches[0])
    started, answered = time.perf_counter(), 0
    while True:
        for batch in batches:
            running.recommend(batch)
            answered += len(batch)
        seconds = time.perf_counter() - started
        if seconds >= TIMED_SECONDS:
            return seconds / answered


def comparison(rows: Sequence[Row], chosen: str, engine: str, device: torch.device, batch: int) -> dict[str, Any]:
    """The ``comparison.json`` form: rows in the order of `RECIPES`, and the table that people read."""
    ordered = sorted(rows, key=lambda row: RECIPES.index(row.recipe))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    timed_on = f"{engine} engine on {name}, batches of {batch}"
    emulated = engine == "reference"
    if emulated:
        timed_on += (
            "; it computes 8-bit numerics in wider formats, so its times say nothing about FP8's speed on Hopper"
        )
    headings, table = _table(ordered)
    return {
        "chosen": chosen,
        "timed_on": timed_on,
        "emulated": emulated,
        "headings": headings,
        "table": table,
        "rows": [
            {
                "recipe": row.recipe,
                "weight_bytes": row.weight_bytes,
                "milliseconds_per_history": row.milliseconds_per_history,
                "not_timed": row.not_timed,
                "gate": row.gate.to_dict(),
            }
            for row in ordered
        ],
    }


def format_comparison(values: dict[str, Any]) -> str:
    """The table for a terminal."""
    rows = [values["headings"], *values["table"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    untimed = [f"{row['recipe']} is not timed: {row['not_timed']}" for row in values["rows"] if row["not_timed"]]
    return "\n".join([*lines, f"time: {values['timed_on']}", *untimed])


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    metrics = [
        f"{name}@{k}" for k in COMPARED_KS for name in ("recall", "ndcg") if f"{name}@{k}" in rows[0].gate.quality
    ]
    top_k = rows[0].gate.top_k
    headings = ["recipe", "top-1", f"top-{top_k}", "95 %", *metrics, "ECE", "score shift", "weights", "ms a history"]
    table = []
    for row in rows:
        gate, calibration = row.gate, row.gate.calibration
        low, high = gate.top_k_interval
        table.append(
            [
                row.recipe,
                f"{gate.top_1_agreement:.3f}",
                f"{gate.top_k_overlap:.3f}",
                f"{low:.3f}-{high:.3f}",
                *(f"{gate.quality[metric].quantized:.4f}" for metric in metrics),
                "-" if calibration.quantized_error is None else f"{calibration.quantized_error:.4f}",
                f"{calibration.score_shift:+.4f}",
                format_bytes(row.weight_bytes),
                "-" if row.milliseconds_per_history is None else f"{row.milliseconds_per_history:.3g}",
            ]
        )
    return headings, table
