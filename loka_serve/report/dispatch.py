"""Speed by site and number of rows, from a dispatch table that was measured on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
NOT_MEASURED = "no dispatch table: this build ran where no GPU kernels were timed"
NO_ENTRIES = "the dispatch table has no entry for this bundle's sites and recipes"


def speed_by_rows(sites: Sequence[Record], dispatch: Record | None) -> dict[str, Any]:
    """What the table says of each site at the recipe that it runs.

    Args:
        sites: of ``probe.json``.
        dispatch: as `loka_serve.kernels.dispatch.Dispatch.save` writes it, or None.

    Returns:
        ``measured``; ``reason`` where it is false; ``environment`` of the measurement; ``cells``: one for each site and
        bucket of rows with ``site, rows, recipe, library, us, bf16_us, mere``, times in microseconds (of experts, of
        both GEMMs), floored MERE or None, rows ascending.
    """
    if dispatch is None:
        return {"measured": False, "reason": NOT_MEASURED, "environment": {}, "cells": []}
    by_shape: dict[tuple[str, str, int, int], list[Record]] = {}
    for entry in dispatch["entries"]:
        shape = entry["shape"]
        by_shape.setdefault((shape["op"], shape["recipe"], shape["n"], shape["k"]), []).append(entry)
    cells = []
    for site in sites:
        of_site = by_shape.get(_key(site), [])
        cells += [_cell(site["name"], entry) for entry in sorted(of_site, key=lambda entry: entry["shape"]["rows"])]
    if not cells:
        return {"measured": False, "reason": NO_ENTRIES, "environment": dispatch["environment"], "cells": []}
    return {"measured": True, "reason": "", "environment": dict(dispatch["environment"]), "cells": cells}


def _key(site: Record) -> tuple[str, str, int, int]:
    """Operation, recipe, n and k of a site's entries."""
    recipe, (n, k) = site["choice"]["recipe"], site["shape"][-2:]
    if site["kind"] == "grouped":  # both GEMMs are timed as one: n is an expert's width, k the model's
        width, model = (k, n) if site["name"].endswith(".down") else (n // 2, k)
        return "experts", recipe, width, model
    # What decides keeps its precision.
    return "linear_float32" if site["kind"] in ("head", "router") else "linear", recipe, n, k


def _cell(site: str, entry: Record) -> dict[str, Any]:
    library, us = min(entry["us"].items(), key=lambda item: item[1])
    return {
        "site": site,
        "rows": entry["shape"]["rows"],
        "recipe": entry["shape"]["recipe"],
        "library": library,
        "us": us,
        "bf16_us": entry["bf16_us"],
        "mere": entry.get("mere", {}).get(library),
    }
