"""What a report says, gathered from a bundle's files: the content of ``report.json``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from loka_serve.report.dispatch import speed_by_rows
from loka_serve.report.frontier import frontier

Record = Mapping[str, Any]
RECIPES = ("bf16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row")
KINDS = {"linear": "dense linears", "grouped": "expert GEMMs", "router": "routers", "head": "heads"}


def gather(
    model_name: str,
    engine: str,
    probe: Record,
    gate: Record,
    comparison: Record | None = None,
    dispatch: Record | None = None,
    engines: Record | None = None,
) -> dict[str, Any]:
    """The report of a bundle.

    Args:
        probe, gate: content of ``probe.json`` and ``gate.json``.
        comparison: content of ``comparison.json`` where the build compared recipes.
        dispatch: a dispatch table measured on a GPU, as `loka_serve.kernels.dispatch.Dispatch.save` writes it.
        engines: content of ``engines.json`` where the build compared engines.
    """
    sites = [_site(site) for site in probe["sites"]]
    speed = speed_by_rows(probe["sites"], dispatch)
    return {
        "model": model_name,
        "engine": engine,
        "summary": summarize(sites, gate),
        "gate": dict(gate),
        "comparison": None if comparison is None else dict(comparison),
        "engines": None if engines is None else dict(engines),
        "speed": speed,
        "frontier": frontier(probe["sites"], speed),
        "mods": probe.get("mods"),
        "sites": sites,
    }


def summarize(sites: Sequence[Record], gate: Record) -> dict[str, Any]:
    """What is FP8, what is not and why, and what it brought, for the first screen."""
    quantized = [site for site in sites if site["recipe"] != "bf16"]
    kept = [site for site in sites if site["recipe"] == "bf16"]
    before = sum(site["bf16_bytes"] for site in sites)
    after = sum(site["weight_bytes"] for site in sites)
    work = sum(site["work"] for site in sites)
    return {
        "sites": len(sites),
        "quantized_sites": len(quantized),
        "quantized_work_share": sum(site["work"] for site in quantized) / work if work else 0.0,
        "bf16_bytes": before,
        "weight_bytes": after,
        "by_kind": [
            {
                "kind": KINDS.get(kind, kind),
                "recipes": dict(Counter(site["recipe"] for site in sites if site["kind"] == kind)),
            }
            for kind in dict.fromkeys(site["kind"] for site in sites)
        ],
        "kept": [{"name": site["name"], "kind": site["kind"], "reason": site["reason"]} for site in kept],
        "largest_error": _largest_error(quantized),
        "passed": gate["passed"],
    }


def _site(site: Record) -> dict[str, Any]:
    inputs = site["inputs"]
    return {
        "name": site["name"],
        "kind": site["kind"],
        "shape": list(site["shape"]),
        "recipe": site["choice"]["recipe"],
        "reason": site["choice"]["reason"],
        "bf16_bytes": site["bf16_bytes"],
        "weight_bytes": site["weight_bytes"],
        "work": inputs["rows"] * math.prod(site["shape"][-2:]),
        "rows": inputs["rows"],
        "absmax": inputs["absmax"],
        "p99": inputs["p99"],
        "octaves": {int(octave): count for octave, count in inputs.get("octaves", {}).items()},
        "errors": {
            recipe: {
                "floored_mere": error["output"]["floored_mere"],
                "relative_frobenius": error["output"]["relative_frobenius"],
                "sqnr_db": error["output"]["sqnr_db"],
            }
            for recipe, error in site["errors"].items()
        },
    }


def _largest_error(quantized: Sequence[Record]) -> dict[str, Any] | None:
    found = [
        (error, site["name"], site["recipe"])
        for site in quantized
        if (error := site["errors"].get(site["recipe"], {}).get("floored_mere")) is not None
    ]
    if not found:
        return None
    error, name, recipe = max(found)
    return {"site": name, "recipe": recipe, "floored_mere": error}
