"""The build's probe: every recipe at every site, a choice, and what each site then costs the model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from loka_serve.build_config import BuildConfig
from loka_serve.catalog.catalog import Catalog
from loka_serve.config import SERVED_BATCH
from loka_serve.dispatch.recipes import choose_with_speeds
from loka_serve.engines.base import EngineLimits, EngineRequest
from loka_serve.engines.tensorrt.support import preferred_recipes
from loka_serve.gate import Ranking
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.collect import SiteInputs
from loka_serve.probe.cost import CANDIDATES, model_costs
from loka_serve.probe.report import SiteReport
from loka_serve.probe.run import AUTO, ProbeOptions, probe, recipes_to_cost, with_costs

TENSORRT = "tensorrt"
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
CACHE_BYTES = 64 << 20
Bars = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


def probe_model(
    config: BuildConfig,
    model: OneRecV2,
    observed: dict[str, SiteInputs],
    held_out: Sequence[EngineRequest],
    ranked: Sequence[Ranking],
    catalog: Catalog,
    bar: Bars,
    speeds: Dispatch | None = None,
) -> list[SiteReport]:
    """Probe a calibrated model; the first `probe_cost_rows` held-out histories with an answer say what sites cost.

    Args:
        model: in BF16, with its weights; left as it is.
        observed: calibration's inputs; emptied on the way.
        held_out, ranked: histories and what the model in BF16 recommends for them.
        bar: gives a progress bar.
        speeds: what `auto` takes into account beside errors; None where nothing was measured.

    Raises:
        QuantizationError: names the site.
    """
    with bar("probe", len(model.sites())) as progress:
        candidates = preferred_recipes if config.engine == TENSORRT else None
        options = ProbeOptions(config.probe_pairs, config.seed, candidates)
        sites = probe(model, observed, config.recipe, options, progress)
    # The table is of the hopper engine's kernels, and says nothing of segments.
    if speeds is not None and config.recipe == AUTO and config.engine != TENSORRT:
        shape = model.config
        limits = EngineLimits(SERVED_BATCH, shape.beam_width, shape.max_context, shape.levels)
        sites = choose_with_speeds(sites, speeds, shape, limits)
    rows = [row for row, ranking in enumerate(ranked) if ranking.items][: config.probe_cost_rows]
    recipes = recipes_to_cost(sites)
    with bar("cost by site", len(rows)) as progress:
        costs = model_costs(
            model,
            [held_out[row] for row in rows],
            [catalog.semantic_ids(ranked[row].items[:CANDIDATES]) for row in rows],
            recipes,
            {site.name: site.inputs.absmax for site in sites},
            progress,
        )
    return with_costs(sites, costs)


def prefers_speed(model: OneRecV2) -> bool:
    """Whether float32 copies of the weights are kept while building: of small checkpoints, 64 MiB at most.

    Beyond that memory matters more, and freed memory is given back at once.
    """
    is_small = sum(parameter.nbytes for parameter in model.parameters()) <= CACHE_BYTES
    if not is_small:
        _return_large_blocks()
    return is_small


def _return_large_blocks() -> None:
    """Have freed blocks of 8 MiB and more go back to the system at once, where the allocator is glibc's.

    It keeps blocks of up to 32 MiB once some were freed. The temporaries of a probe then leave holes that
    count as resident: half as much again as is in use. Costs some time, so it is for checkpoints where memory matters.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, 8 << 20)
