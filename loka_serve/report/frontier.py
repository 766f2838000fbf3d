"""What each site brings in time and costs in error: the frontier from all BF16 to all that was quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
MODELLED_GAIN = 2.0
"""How much faster 8-bit arithmetic is where nothing was measured: the ratio of the GPU's peak rates."""


def frontier(sites: Sequence[Record], speed: Record) -> dict[str, Any]:
    """Sites go over to their recipe one by one, first those that save the most time for their error.

    A site's error is the squared relative Frobenius error of its recipe beyond that of BF16; errors of different sites
    are taken to be independent, so they add, and the root is reported. Time is a share of all GEMM time in BF16: each
    site's rows x out x in, times the ratio of its measured times at the largest measured number of rows, or 1/2 where
    it was not measured.

    Args:
        sites: of ``probe.json``.
        speed: from `loka_serve.report.dispatch.speed_by_rows`.

    Returns:
        ``measured_share`` of the time that rests on measured ratios; ``points``: ``site, time, error`` after each step,
        the first one all in BF16.
    """
    ratios = _ratios(speed)
    steps, total, measured = [], 0.0, 0.0
    for site in sites:
        work = float(site["inputs"]["rows"] * math.prod(site["shape"][-2:]))
        total += work
        recipe = site["choice"]["recipe"]
        if recipe == "bf16" or not site["errors"]:
            continue
        ratio = ratios.get(site["name"])
        measured += work if ratio is not None else 0.0
        saved = work * (1.0 - (1.0 / MODELLED_GAIN if ratio is None else ratio))
        steps.append((site["name"], saved, _added_error(site, recipe)))
    steps.sort(key=lambda step: (-step[1] / max(step[2], 1e-12), step[0]))
    time, error = total, 0.0
    points = [{"site": None, "time": 1.0, "error": 0.0}]
    for name, saved, added in steps:
        time, error = time - saved, error + added
        points.append({"site": name, "time": time / total if total else 1.0, "error": math.sqrt(error)})
    return {"measured_share": measured / total if total else 0.0, "points": points}


def _added_error(site: Record, recipe: str) -> float:
    """Squared; null (not finite) counts as losing the output altogether."""
    of_recipe, of_bf16 = (site["errors"][name]["output"]["relative_frobenius"] for name in (recipe, "bf16"))
    if of_recipe is None:
        return 1.0
    return max(0.0, of_recipe**2 - (of_bf16 or 0.0) ** 2)


def _ratios(speed: Record) -> dict[str, float]:
    """Time over BF16's, by site, at the largest number of rows where both were measured."""
    ratios: dict[str, float] = {}
    for cell in speed["cells"]:  # rows ascending: the last one stays
        if cell["bf16_us"]:
            ratios[cell["site"]] = cell["us"] / cell["bf16_us"]
    return ratios
