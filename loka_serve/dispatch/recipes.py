"""`auto` with speeds: a site stays BF16 where no recipe within its error bounds is faster on the measured GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loka_serve.dispatch.sites import Work, speedup, work_of_sites
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.buckets import Buckets
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.kernels.linear.implementations import RECIPES as SERVED_RECIPES
from loka_serve.models.config import OneRecV2Config
from loka_serve.probe.choose import choose
from loka_serve.probe.report import SiteReport
from loka_serve.quantization.recipes import RECIPES


def choose_with_speeds(
    sites: Sequence[SiteReport], table: Dispatch, config: OneRecV2Config, limits: EngineLimits
) -> list[SiteReport]:
    """The reports with choices by error and speed. Sites that the table does not know keep theirs.

    Args:
        limits: to serve with; their buckets say how many rows a site sees.
    """
    buckets = Buckets.of(limits, HopperOptions())
    works = work_of_sites(config)
    return [_with_speed(site, table, works, rows_seen(site.name, buckets)) for site in sites]


def rows_seen(site: str, buckets: Buckets) -> tuple[int, ...]:
    """Numbers of rows that a site has in the graphs of these buckets, ascending."""
    first = set(buckets.batches)
    later = {batch * beam for batch in buckets.batches for beam in buckets.beams}
    if site.startswith("context."):
        return tuple(sorted({batch * (items + 1) for batch in buckets.batches for items in buckets.contexts}))
    if site.startswith("heads."):
        return tuple(sorted(first if site == "heads.0" else later))
    return tuple(sorted(first | later))


def _with_speed(site: SiteReport, table: Dispatch, works: Mapping[str, Work], rows: Sequence[int]) -> SiteReport:
    work = works.get(site.name)
    if work is None:
        return site
    measured = {recipe: speedup(table, work, recipe, rows) for recipe in SERVED_RECIPES if recipe != "bf16"}
    speedups = {recipe: gain for recipe, gain in measured.items() if gain is not None}
    if not speedups:
        return site
    choice = choose(site.kind, site.errors, speedups)
    shapes = RECIPES[choice.recipe].state_shapes(site.shape).values()
    stored = sum(dtype.itemsize * math.prod(extent) for dtype, extent in shapes)
    return replace(site, choice=choice, weight_bytes=stored)
