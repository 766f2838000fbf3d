"""The engine process at work: takes batches over ZeroMQ, runs the engine, gives ranked items back.

Three threads, one stage each, so that filters of the next batch and items of the last are the CPU's work while the
device computes: the reader decodes and compiles filters, the main thread runs the engine, the writer expands leaves.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import zmq
from numpy.typing import NDArray

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.filters import CatalogFilter
from loka_serve.decoding.expansion import expand
from loka_serve.engines.base import AsynchronousEngine, BeamResult, Engine, EngineRequest, RequestBatch, Ticket
from loka_serve.errors import LokaError
from loka_serve.server import messages
from loka_serve.server.messages import (
    EXCEPTION,
    INVALID,
    NAN,
    Batch,
    BatchResult,
    CatalogLoaded,
    WireRequest,
    WireResult,
)

logger = logging.getLogger(__name__)

LANDING_POLL_S = 0.0002  # how often a batch on its way is looked after while no other one is ready
POLL_MS = 500  # how often the reader looks whether its parent still lives


@dataclass
class PreparedBatch:
    """A batch whose filters are compiled."""

    message: Batch
    catalog: Catalog
    requests: RequestBatch
    timings: dict[str, float]


@dataclass
class Flight:
    """A batch that the engine has: its ticket, its result where it was computed at once, or why it failed."""

    batch: PreparedBatch
    started: float
    result: Ticket | BeamResult | Exception


@dataclass
class ComputedBatch:
    """A batch with the engine's answer; rows that the engine did not compute are None."""

    prepared: PreparedBatch
    rows: list[tuple[BeamResult, int] | None]


@dataclass
class EngineWorker:
    """Serves one engine until it is told to stop.

    Args:
        engine: ready to take batches, with `catalog` live in it.
        work: PULL socket of messages from the API process.
        results: PUSH socket to it.
        parent: process id of the API process.
    """

    engine: Engine
    catalog: Catalog
    work: zmq.Socket[bytes]
    results: zmq.Socket[bytes]
    parent: int
    _prepared: queue.Queue[PreparedBatch | None] = field(default_factory=lambda: queue.Queue(2))
    _outgoing: queue.Queue[ComputedBatch | CatalogLoaded | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._catalogs = {self.catalog.version: self.catalog}
        compute_lookups(self.catalog)
        self._live_version = self.catalog.version
        self._depth = self.engine.in_flight if isinstance(self.engine, AsynchronousEngine) else 1

    def run(self) -> None:
        """Blocks; an exception of the reader or writer ends the process, since the API then starts a fresh one."""
        stages = [
            threading.Thread(target=_end_process_on_error, args=(stage,), name=stage.__name__, daemon=True)
            for stage in (self._read, self._write)
        ]
        for thread in stages:
            thread.start()
        self._run_engine()
        self._outgoing.put(None)
        for thread in stages:
            thread.join()

    # reader

    def _read(self) -> None:
        while True:
            if not self.work.poll(POLL_MS):
                if os.getppid() != self.parent:
                    os._exit(0)
                continue
            message = messages.decode_to_engine(self.work.recv())
            if isinstance(message, Batch):
                self._prepared.put(self._prepare(message))
            elif isinstance(message, messages.LoadCatalog):
                threading.Thread(target=self._load_catalog, args=(message,), name="load_catalog", daemon=True).start()
            elif isinstance(message, messages.DropCatalog):
                self._catalogs.pop(message.version, None)
            else:
                self._prepared.put(None)
                return

    def _load_catalog(self, message: messages.LoadCatalog) -> None:
        """Beside the live one, so that batches keep running."""
        try:
            catalog = Catalog.load(message.path)
            if catalog.version != message.version:
                raise LokaError(f"catalog version {catalog.version}: expected {message.version}")
        except LokaError as error:
            self._outgoing.put(CatalogLoaded(message.version, str(error)))
            return
        compute_lookups(catalog)
        self._catalogs[catalog.version] = catalog
        self._outgoing.put(CatalogLoaded(catalog.version))

    def _prepare(self, message: Batch) -> PreparedBatch:
        started = time.perf_counter()
        catalog = self._catalogs[message.catalog_version]
        requests = RequestBatch(tuple(to_engine_request(request, catalog) for request in message.requests))
        return PreparedBatch(message, catalog, requests, {"prepare": time.perf_counter() - started})

    # engine

    def _run_engine(self) -> None:
        """Batches one after another; an engine that computes on its own gets the next one before it gave the last."""
        flights: deque[Flight] = deque()
        while True:
            try:
                batch = self._prepared.get(timeout=LANDING_POLL_S if flights else None)
            except queue.Empty:
                if self._has_landed(flights[0]):
                    self._outgoing.put(self._land(flights.popleft()))
                continue
            swap = batch is not None and batch.catalog.version != self._live_version
            while flights and (batch is None or swap or len(flights) >= self._depth):
                self._outgoing.put(self._land(flights.popleft()))
            if batch is None:
                return
            if swap:  # between batches, never within one
                self.engine.swap_catalog(batch.catalog)
                self._live_version = batch.catalog.version
            flights.append(self._launch(batch))

    def _launch(self, batch: PreparedBatch) -> Flight:
        started = time.perf_counter()
        result: Ticket | BeamResult | Exception
        try:
            if isinstance(self.engine, AsynchronousEngine):
                result = self.engine.submit(batch.requests)
            else:
                result = self.engine.recommend(batch.requests)
        except Exception as error:
            result = error
        return Flight(batch, started, result)

    def _has_landed(self, flight: Flight) -> bool:
        if isinstance(flight.result, BeamResult | Exception) or not isinstance(self.engine, AsynchronousEngine):
            return True
        return self.engine.is_done(flight.result)

    def _land(self, flight: Flight) -> ComputedBatch:
        batch, result = flight.batch, flight.result
        rows: list[tuple[BeamResult, int] | None]
        try:
            if isinstance(result, Exception):
                raise result
            if not isinstance(result, BeamResult):
                assert isinstance(self.engine, AsynchronousEngine)
                result = self.engine.collect(result)
        except Exception as error:
            if is_device_error(error):
                raise
            logger.exception("the engine failed on a batch of %d; trying its requests one by one", len(batch.requests))
            rows = [self._compute_one(request) for request in batch.requests.requests]
        else:
            batch.timings.update(result.timings)
            rows = [(result, row) for row in range(len(batch.requests))]
        batch.timings["total"] = time.perf_counter() - flight.started
        return ComputedBatch(batch, rows)

    def _compute_one(self, request: EngineRequest) -> tuple[BeamResult, int] | None:
        try:
            return self.engine.recommend(RequestBatch((request,))), 0
        except Exception as error:
            if is_device_error(error):
                raise
            logger.error("the engine failed on one request: %s", error)
            return None

    # writer

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            self.results.send(messages.encode(finish(message) if isinstance(message, ComputedBatch) else message))


def compute_lookups(catalog: Catalog) -> None:
    """Compute now what a catalog would compute at its first use, so that no request pays for it."""
    catalog.trie.semantic_ids()
    catalog.filter([0], {name: [] for name in catalog.attributes})


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
        WireResult(error=EXCEPTION)
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


def is_device_error(error: Exception) -> bool:
    """Whether the device's context is lost: every later call would fail too, only a new process helps."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _end_process_on_error(stage: Callable[[], None]) -> None:
    try:
        stage()
    except BaseException:
        logger.exception("the engine process ends")
        logging.shutdown()
        os._exit(1)
