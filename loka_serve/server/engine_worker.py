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

import zmq

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import (
    AsynchronousEngine,
    BeamResult,
    DriftWatchingEngine,
    Engine,
    EngineRequest,
    RequestBatch,
    Ticket,
)
from loka_serve.errors import LokaError
from loka_serve.server import messages
from loka_serve.server.device_memory import MemoryWatch
from loka_serve.server.engine_batches import ComputedBatch, PreparedBatch, finish, prepare
from loka_serve.server.messages import CATALOG, Batch, CatalogLoaded, DeviceMemory, Drift, SwapFinished, SwapStarted

logger = logging.getLogger(__name__)

LANDING_POLL_S = 0.0002  # how often a batch on its way is looked after while no other one is ready
POLL_MS = 500  # how often the reader looks whether its parent still lives


# Texts of errors after which no call to the device succeeds; CUDA runtime and driver, and Triton's launcher.
DEVICE_ERRORS = ("CUDA error", "CUDA_ERROR_", "Triton Error [CUDA]")
# What those also say where memory alone was short, after which everything else still runs.
MEMORY_ERRORS = ("out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED")


@dataclass
class PreparedSwap:
    """A swap that was asked for by name."""

    version: str
    catalog: Catalog | None


@dataclass
class Flight:
    """A batch that the engine has: its ticket, its result where it was computed at once, or why it failed."""

    batch: PreparedBatch
    started: float
    result: Ticket | BeamResult | Exception


@dataclass
class EngineWorker:
    """Serves one engine until it is told to stop.

    Args:
        engine: ready to take batches, with `catalog` live in it.
        work: PULL socket of messages from the API process.
        results: PUSH socket to it.
        parent: process id of the API process.
        memory: looked at now and then, and after a swap.
    """

    engine: Engine
    catalog: Catalog
    work: zmq.Socket[bytes]
    results: zmq.Socket[bytes]
    parent: int
    memory: MemoryWatch | None = None
    _prepared: queue.Queue[PreparedBatch | PreparedSwap | None] = field(default_factory=lambda: queue.Queue(2))
    _outgoing: queue.Queue[ComputedBatch | CatalogLoaded | SwapStarted | SwapFinished | Drift | DeviceMemory | None] = (
        field(default_factory=queue.Queue)
    )

    def __post_init__(self) -> None:
        self._catalogs = {self.catalog.version: self.catalog}
        compute_lookups(self.catalog)
        self._live_version = self.catalog.version
        self._drift = self.engine if isinstance(self.engine, DriftWatchingEngine) else None
        self._depth = self.engine.in_flight if isinstance(self.engine, AsynchronousEngine) else 1

    def run(self) -> None:
        """Blocks; an exception of the reader or writer ends the process, since the API then starts a fresh one."""
        self._report_memory(at_once=True)
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
                self._prepared.put(prepare(message, self._catalogs[message.catalog_version]))
            elif isinstance(message, messages.SwapCatalog):
                self._prepared.put(PreparedSwap(message.version, self._catalogs.get(message.version)))
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
            compute_lookups(catalog)
        except Exception as error:
            logger.error("catalog %s cannot be loaded: %s", message.version, error, exc_info=traceback_of(error))
            self._outgoing.put(CatalogLoaded(message.version, describe(error)))
            return
        self._catalogs[catalog.version] = catalog
        self._outgoing.put(CatalogLoaded(catalog.version))

    # engine

    def _run_engine(self) -> None:
        """Batches one after another; an engine that computes on its own gets the next one before it gave the last."""
        flights: deque[Flight] = deque()
        while True:
            try:
                work = self._prepared.get(timeout=LANDING_POLL_S if flights else None)
            except queue.Empty:
                if self._has_landed(flights[0]):
                    self._land(flights)
                continue
            stays = isinstance(work, PreparedBatch) and work.catalog.version == self._live_version
            while flights and (not stays or len(flights) >= self._depth):
                self._land(flights)
            if work is None:
                return
            if isinstance(work, PreparedSwap):
                self._swap_as_asked(work)
            elif self._swap(work.catalog):
                flights.append(self._launch(work))
            else:
                self._outgoing.put(ComputedBatch(work, [None] * len(work.requests), CATALOG))

    # the catalog: between batches, never within one

    def _swap_as_asked(self, swap: PreparedSwap) -> None:
        if swap.catalog is None:
            error = f"catalog {swap.version}: expected a version that was loaded"
            self._outgoing.put(SwapFinished(swap.version, error))
        elif swap.version == self._live_version:
            self._outgoing.put(SwapFinished(swap.version))
        else:
            self._swap(swap.catalog)

    def _swap(self, catalog: Catalog) -> bool:
        """Go over to a catalog, and say so before and after; False, and the one before is live, if that failed."""
        if catalog.version == self._live_version:
            return True
        self._outgoing.put(SwapStarted(catalog.version))
        logger.info("swapping to catalog %s", catalog.version)
        started = time.perf_counter()
        try:
            self.engine.swap_catalog(catalog)
        except Exception as error:
            if is_device_error(error):
                raise
            logger.error("catalog %s is refused: %s", catalog.version, error, exc_info=traceback_of(error))
            self._outgoing.put(SwapFinished(catalog.version, describe(error)))
            return False
        logger.info("swapped to catalog %s in %.2f s", catalog.version, time.perf_counter() - started)
        self._live_version = catalog.version
        self._outgoing.put(SwapFinished(catalog.version))
        self._report_memory(at_once=True)
        return True

    # a batch

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

    def _land(self, flights: deque[Flight]) -> None:
        """Give the oldest batch's answer. If it failed its requests run one by one, after all others are collected."""
        failed: list[Flight] = []
        while flights:
            flight = flights.popleft()
            result = self._collect(flight)
            if isinstance(result, BeamResult):
                flight.batch.timings.update(result.timings)
                self._answer(flight, [(result, row) for row in range(len(flight.batch.requests))])
                if not failed:
                    return
            else:
                failed.append(flight)
        for flight in failed:
            self._answer(flight, [self._compute_one(request) for request in flight.batch.requests.requests])

    def _collect(self, flight: Flight) -> BeamResult | Exception:
        """The batch's result, or why there is none; raises what shows that the device is lost."""
        result = flight.result
        if not isinstance(result, BeamResult | Exception):
            assert isinstance(self.engine, AsynchronousEngine)
            try:
                return self.engine.collect(result)
            except Exception as error:
                result = error
        if isinstance(result, Exception):
            if is_device_error(result):
                raise result
            requests = len(flight.batch.requests)
            logger.error("the engine failed on a batch of %d; its requests run alone", requests, exc_info=result)
        return result

    def _answer(self, flight: Flight, rows: list[tuple[BeamResult, int] | None]) -> None:
        flight.batch.timings["total"] = time.perf_counter() - flight.started
        self._outgoing.put(ComputedBatch(flight.batch, rows))
        self._judge_drift()
        self._report_memory()

    def _report_memory(self, at_once: bool = False) -> None:
        if self.memory is not None and (reading := self.memory.read(at_once)) is not None:
            self._outgoing.put(reading)

    def _judge_drift(self) -> None:
        """After the answer, which need not wait for it; a guard that fails costs no request."""
        if self._drift is None:
            return
        try:
            sites = self._drift.judge_drift()
        except Exception as error:
            if is_device_error(error):
                raise
            logger.exception("the drift guard failed")
            return
        if sites is not None:
            self._outgoing.put(Drift(sites))

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


def describe(error: Exception) -> str:
    """Why something failed, for the client: our own words, of others only the kind, as their text may hold anything."""
    return str(error) if isinstance(error, LokaError) else f"unexpected {type(error).__name__}"


def traceback_of(error: Exception) -> Exception | None:
    """For `exc_info` of a log line: the error, unless it is one of ours without a cause, which says all in its text."""
    return None if isinstance(error, LokaError) and error.__cause__ is None else error


def is_device_error(error: Exception) -> bool:
    """Whether the device's context is lost: every later call would fail too, only a new process helps."""
    text = str(error)
    if any(words in text for words in MEMORY_ERRORS):
        return False
    return type(error).__name__ == "AcceleratorError" or any(words in text for words in DEVICE_ERRORS)


def _end_process_on_error(stage: Callable[[], None]) -> None:
    try:
        stage()
    except BaseException:
        logger.exception("the engine process ends")
        logging.shutdown()
        os._exit(1)
