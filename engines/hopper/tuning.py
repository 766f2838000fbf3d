"""Which shapes an engine runs, and the dispatch table for them: read from a file, or measured and written there."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from loka_serve.engines.base import DispatchInfo
from loka_serve.engines.hopper.buckets import Buckets
from loka_serve.engines.hopper.weights import DenseFeedForward, HopperWeights, Site
from loka_serve.errors import EngineError
from loka_serve.kernels.dispatch import Dispatch, Shape
from loka_serve.kernels.dispatch_rule import MIN_SPEEDUP

logger = logging.getLogger(__name__)

ROW_GRID = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Numbers of rows that are measured; others take what the next larger one chose, those beyond what the last did."""


def default_dispatch_file() -> Path | None:
    """`dispatch.json` in the user's cache directory; None, with a warning, for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "loka_serve" / "dispatch.json"
    except RuntimeError as error:
        logger.warning("dispatch: %s: %s: the table is not kept; set HOME or XDG_CACHE_HOME", cache, error)
        return None


def shapes_of(weights: HopperWeights, buckets: Buckets) -> set[Shape]:
    """Every dense linear at every number of rows that a bucket gives it."""
    first = set(buckets.batches)
    later = {batch * beam for batch in buckets.batches for beam in buckets.beams}
    context = {batch * (items + 1) for batch in buckets.batches for items in buckets.contexts}
    shapes = {_shape("linear", weights.context.projection, rows) for rows in context}
    shapes |= {_shape(op, site, rows) for op, site in _decoder_sites(weights) for rows in first | later}
    for level, head in enumerate(weights.heads):
        shapes |= {_shape("linear_float32", head, rows) for rows in (later if level else first)}
    return shapes


def dispatch_for(weights: HopperWeights, buckets: Buckets, device: torch.device, path: Path | None = None) -> Dispatch:
    """The table for an engine's shapes. What the file does not cover, or was measured elsewhere, is measured now.

    A file that cannot be found, read or written costs a warning and the time of measuring, at every start.
    """
    return traced_dispatch_for(weights, buckets, device, path)[0]


def traced_dispatch_for(
    weights: HopperWeights,
    buckets: Buckets,
    device: torch.device,
    path: Path | None = None,
    own: Path | None = None,
    frozen: bool = False,
) -> tuple[Dispatch, DispatchInfo]:
    """As `dispatch_for`, and where the table is from.

    Args:
        path: what is read if `own` does not serve, and written if that does not serve either.
        own: the bundle's own table, which is read first and never written: a bundle is as it was built.
        frozen: measure nothing.

    Raises:
        EngineError: `frozen`, and neither file holds what this engine needs, measured in this environment.
    """
    shapes, path = shapes_of(weights, buckets), path or default_dispatch_file()
    reasons: list[tuple[str, str]] = []
    for file in (own, path):
        if file is None or not os.path.exists(file):  # Path.exists raises where a folder may not be looked into
            continue
        dispatch = Dispatch.load(file, device)
        if dispatch.covers(shapes):
            return dispatch, DispatchInfo("loaded")
        missing = sum(shape not in dispatch.entries for shape in shapes)
        detail = dispatch.reason or f"{file} lacks {missing} of the {len(shapes)} shapes of this engine's buckets"
        reasons.append((_reason_class(dispatch, file), detail))
    if frozen:
        problem = "; ".join(detail for _, detail in reasons) or f"there is no table: neither {own} nor {path}"
        raise EngineError(
            f"--frozen-dispatch: {problem}. Write one on this machine with python -m loka_serve.dispatch measure "
            "--bundle DIR, or serve without --frozen-dispatch to measure at every such start"
        )
    info = DispatchInfo("measured", reasons[0][0] if reasons else "no_file")
    logger.info("dispatch: measuring %d shapes on %s; kept in %s", len(shapes), device, path or "memory alone")
    with tqdm(total=len(shapes), desc="dispatch", disable=not sys.stderr.isatty(), file=sys.stderr) as bar:
        dispatch = Dispatch.measure(sorted(shapes), device, bar.update)
    _warn_of_slow_recipes(dispatch)
    if path is None:
        return dispatch, info
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dispatch.save(path)
    except OSError as error:
        logger.warning("dispatch: the table is not kept: %s", error)
    return dispatch, info


def _warn_of_slow_recipes(dispatch: Dispatch) -> None:
    """Says which weights would be faster in BF16 at every number of rows: they are quantized, so the build must know.

    A bundle holds each weight in one recipe. Widened to BF16 at load it would take three times the memory, and its
    inputs would be needed in another form, so only implementations of that recipe are candidates here.
    """
    slow: dict[tuple[str, str, int, int], bool] = {}
    for shape, entry in dispatch.entries.items():
        key = (shape.op, shape.recipe, shape.n, shape.k)
        behind = entry.bf16_us is not None and not entry.bf16_us > MIN_SPEEDUP * min(entry.us.values())
        slow[key] = slow.get(key, shape.recipe != "bf16") and behind
    for (op, recipe, n, k), behind in slow.items():
        if behind:
            logger.warning(
                "dispatch: %s [%d, %d] in %s is not %gx as fast as BF16 at any number of rows: build with --dispatch",
                *(op, n, k, recipe, MIN_SPEEDUP),
            )


def _reason_class(loaded: Dispatch, path: Path) -> str:
    """Why a table on file was not enough, one of `DISPATCH_REASONS`."""
    if not loaded.reason:
        return "incomplete"
    return "other_environment" if loaded.reason.startswith(f"{path} was measured elsewhere") else "unreadable"


def _decoder_sites(weights: HopperWeights) -> Iterator[tuple[str, Site]]:
    for layer in weights.layers:
        for site in (layer.query, layer.cross_output, layer.qkv, layer.self_output):
            yield "linear", site
        feed_forward = layer.feed_forward
        dense = feed_forward if isinstance(feed_forward, DenseFeedForward) else feed_forward.shared
        if dense is not None:
            yield "linear", dense.gate_up
            yield "linear", dense.down
        # A bfloat16 router is no linear of its own: the kernel that selects experts multiplies by it.
        if not isinstance(feed_forward, DenseFeedForward) and feed_forward.router.recipe != "bf16":
            yield "linear_float32", feed_forward.router


def _shape(op: str, site: Site, rows: int) -> Shape:
    n, k = site.weight.shape
    measured = next((size for size in ROW_GRID if size >= rows), ROW_GRID[-1])
    return Shape(op, site.recipe, n, k, measured)
