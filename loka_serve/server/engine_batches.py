"""What the engine process does with a batch before and after its engine: arrays and filters in, ranked items out."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.filters import CatalogFilter
from loka_serve.decoding.expansion import expand
from loka_serve.engines.base import BeamResult, EngineRequest, RequestBatch
from loka_serve.server import messages
from loka_serve.server.messages import EXCEPTION, INVALID, NAN, Batch, BatchResult, WireRequest, WireResult


@dataclass
class PreparedBatch:
    """A batch whose filters are compiled."""

    message: Batch
    catalog: Catalog
    requests: RequestBatch
    timings: dict[str, float]


@dataclass
class ComputedBatch:
    """A batch with the engine's answer; rows that the engine did not compute are None, because of `error`."""

    prepared: PreparedBatch
    rows: list[tuple[BeamResult, int] | None]
    error: str = EXCEPTION


def prepare(message: Batch, catalog: Catalog) -> PreparedBatch:
    """Unpack a batch and compile its filters."""
    started = time.perf_counter()
    requests = RequestBatch(tuple(to_engine_request(request, catalog) for request in message.requests))
    return PreparedBatch(message, catalog, requests, {"prepare": time.perf_counter() - started})


def to_engine_request(request: WireRequest, catalog: Catalog) -> EngineRequest:
    """Unpack the arrays and compile the filter."""
    exclude = messages.unpack_integers(request.exclude)
    catalog_filter: CatalogFilter | None = None
    if len(exclude) or request.predicates:
        catalog_filter = catalog.filter(exclude, request.predicates)
    return EngineRequest(
        history=messages.unpack_integers(request.history).reshape(-1, catalog.levels),
        features=np.array(request.features, dtype=np.int32),
        beam_width=request.beam_width,
        filter=catalog_filter,
    )


def finish(computed: ComputedBatch) -> BatchResult:
    """Leaves to items, for each request of a batch; a row that is not usable fails alone."""
    batch = computed.prepared
    started = time.perf_counter()
    results = [
        WireResult(error=computed.error)
        if row is None
        else to_result(row[0], row[1], request.filter, batch.catalog, wire.num_items)
        for row, request, wire in zip(computed.rows, batch.requests.requests, batch.message.requests, strict=True)
    ]
    return BatchResult(batch.message.batch_id, results, {**batch.timings, "expand": time.perf_counter() - started})


def to_result(
    result: BeamResult, row: int, catalog_filter: CatalogFilter | None, catalog: Catalog, num_items: int
) -> WireResult:
    """The ranked items of one row, or why it cannot be used: not a number, or leaves that must not be there."""
    count = int(result.counts[row])
    leaves, scores = result.leaves[row, :count], result.scores[row, :count]
    if result.failed[row] or not np.isfinite(scores).all():
        return WireResult(error=NAN)
    if not leaves_are_valid(leaves, catalog_filter, catalog):
        return WireResult(error=INVALID)
    allowed = None if catalog_filter is None else catalog_filter.allowed_items
    items = expand(leaves, scores, catalog, allowed, num_items)
    return WireResult(
        items=messages.pack_integers([item.item_index for item in items]),
        scores=messages.pack_scores([item.score for item in items]),
        complete=len(items) == num_items,
    )


def leaves_are_valid(leaves: NDArray[np.int32], catalog_filter: CatalogFilter | None, catalog: Catalog) -> bool:
    """Whether these are distinct leaves of the catalog that the filter allows."""
    if len(leaves) and not (leaves.min() >= 0 and leaves.max() < catalog.trie.leaf_count):
        return False
    if catalog_filter is not None and not catalog_filter.allowed_nodes[-1][leaves].all():
        return False
    return len(np.unique(leaves)) == len(leaves)
