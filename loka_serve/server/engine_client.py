"""Keeps an engine process running: watches it, passes its answers on, and starts a new one when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from loka_serve.server import messages
from loka_serve.server.batcher import RETRY_SECONDS, Batcher
from loka_serve.server.engine_connection import Connection, EngineFailure, EngineSettings
from loka_serve.server.messages import (
    START_FAILED_STATUS,
    Batch,
    BatchResult,
    CatalogLoaded,
    DeviceMemory,
    Drift,
    Ready,
    StartFailed,
    SwapFinished,
    SwapStarted,
)
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import UNAVAILABLE, ProblemError

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
WATCH_SECONDS = 0.25
PROVEN_SECONDS = 60.0  # an engine that ran this long, or answered a batch, was not a failed start
STOP_SECONDS = 2.0


class EngineRefusal(Exception):
    """The engine goes on as before and does not do what it was asked for; the text says why."""


@dataclass
class EngineClient:
    """Keeps one engine process running.

    Attributes:
        extra_catalogs: version -> file of catalogs beside the bundle's; a new process loads them before it is ready.
        live_catalog: the version that a new process swaps to before it is ready; None: the bundle's.
        on_give_up: called with a reason (and whether it was permanent) when no engine can be had.
    """

    settings: EngineSettings
    metrics: ServerMetrics
    extra_catalogs: dict[str, str] = field(default_factory=dict)
    live_catalog: str | None = None
    batcher: Batcher = field(init=False)
    on_give_up: Callable[[str, bool], None] = field(init=False)
    ready: Ready | None = None
    _connection: Connection | None = None
    _loading: dict[str, asyncio.Future[CatalogLoaded]] = field(default_factory=dict)
    _swaps: dict[str, asyncio.Future[SwapFinished]] = field(default_factory=dict)
    _swap_since: float | None = None  # when a swap that is not finished was asked for, or began
    _missing: set[str] = field(default_factory=set)  # catalogs that a new process has yet to load
    _up_since: float | None = None
    _proved_itself: bool = False
    _stopping: bool = False

    def send_batch(self, batch: Batch) -> None:
        """For the batcher; raises ProblemError (503) when the engine takes nothing."""
        try:
            if self._connection is None:
                raise EngineFailure("there is no engine")
            self._connection.send(batch)
        except EngineFailure:
            raise ProblemError(UNAVAILABLE, "the engine is restarting", retry_after=RETRY_SECONDS) from None

    async def load_catalog(self, version: str, path: str) -> None:
        """Have the engine read a compiled catalog; batches may name its version afterwards.

        Raises:
            EngineFailure: it could not, or it ended meanwhile.
        """
        if self._connection is None:
            raise EngineFailure("the engine is restarting")
        future: asyncio.Future[CatalogLoaded] = asyncio.get_running_loop().create_future()
        self._loading[version] = future
        try:
            self._connection.send(messages.LoadCatalog(version, path))
            loaded = await asyncio.wait_for(future, self.settings.start_timeout)
        except TimeoutError:
            raise EngineFailure(f"the engine did not load it within {self.settings.start_timeout:g} s") from None
        finally:
            self._loading.pop(version, None)
        if loaded.error is not None:
            raise EngineFailure(loaded.error)
        self.extra_catalogs[version] = path

    async def swap_catalog(self, version: str) -> None:
        """Have the engine go over to a version that it has loaded, so that batches may name it without risk.

        Raises:
            EngineRefusal: it cannot, and goes on with the one before.
            EngineFailure: it is restarting, or ended meanwhile. A swap that does not end, ends the engine process.
        """
        if self._connection is None or self._up_since is None:
            raise EngineFailure("the engine is restarting")
        future: asyncio.Future[SwapFinished] = asyncio.get_running_loop().create_future()
        self._swaps[version], self._swap_since = future, time.monotonic()
        try:
            self._connection.send(messages.SwapCatalog(version))
            finished = await future
        finally:
            self._swaps.pop(version, None)
        if finished.error is not None:
            raise EngineRefusal(finished.error)

    def drop_catalog(self, version: str) -> None:
        """Let the engine forget a version that no batch will name again."""
        self.extra_catalogs.pop(version, None)
        if self._connection is not None:
            with contextlib.suppress(EngineFailure):
                self._connection.send(messages.DropCatalog(version))

    async def run(self) -> None:
        """Start engines until told to stop, or until too many in a row have failed."""
        try:
            await self._keep_running()
        except Exception:
            logger.exception("the supervision of the engine failed")
            self.on_give_up("the supervision of the engine failed", False)

    async def _keep_running(self) -> None:
        failures = 0
        while not self._stopping:
            await asyncio.sleep(BACKOFF_SECONDS[min(max(failures - 1, 0), len(BACKOFF_SECONDS) - 1)])
            failure = await self._run_one_process()
            if self._stopping:
                return
            failures = 1 if self._proved_itself else failures + 1
            if failure.permanent:
                self.on_give_up(str(failure), True)
                return
            if failures > self.settings.restarts:
                self.on_give_up(f"the engine failed {failures} times in a row: {failure}", False)
                return
            logger.error("engine: %s", failure)
            self.metrics.engine_restarts.inc()

    def stop(self) -> None:
        """Ask the engine to end; `run` returns when it has. Cancelling `run` kills it."""
        self._stopping = True
        if self._connection is not None:
            with contextlib.suppress(EngineFailure):
                self._connection.send(messages.Stop())

    def abandon(self) -> None:
        """Kill the engine and remove its sockets without waiting for anything."""
        if self._connection is not None:
            self._connection.abandon()

    async def _run_one_process(self) -> EngineFailure:
        """From start to end of one process; returns why it ended."""
        try:
            connection = Connection(self.settings)
        except (OSError, zmq.ZMQError) as error:  # a full disk, or a TMPDIR too long for a socket's address
            return EngineFailure(f"no socket in {tempfile.gettempdir()} (TMPDIR): {error.strerror}", permanent=True)
        self._connection, self._proved_itself, self._up_since, self._swap_since = connection, False, None, None
        try:
            await connection.start()
            watchers = [self._receive(connection), self._watch_process(connection), self._watch_clock()]
            tasks = [asyncio.ensure_future(watcher) for watcher in watchers]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                failure = next(iter(done)).exception()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(failure, EngineFailure):
                return failure
            logger.error("unexpected failure", exc_info=failure)
            return EngineFailure("an unexpected failure in the API process")
        except OSError as error:
            return EngineFailure(f"the engine process cannot be started: {error.strerror}")
        finally:
            self._mark_down()
            await connection.close()

    def _mark_up(self) -> None:
        self._up_since = time.monotonic()
        self.metrics.engine_up.set(1)
        self.batcher.engine_up()

    def _mark_down(self) -> None:
        self.metrics.engine_up.set(0)
        self.metrics.gpu_memory.clear()
        self._connection, self.ready = None, None
        if self._up_since is not None:
            self._proved_itself |= time.monotonic() - self._up_since > PROVEN_SECONDS
        waiting: list[asyncio.Future[Any]] = [*self._loading.values(), *self._swaps.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineFailure("the engine is restarting"))
        self.batcher.engine_down("the engine is restarting")

    async def _receive(self, connection: Connection) -> None:
        while True:
            message = await connection.receive()
            if isinstance(message, BatchResult):
                try:
                    self.batcher.receive(message)
                except ValueError as error:
                    raise EngineFailure(str(error)) from None
                self._proved_itself = True
            elif isinstance(message, CatalogLoaded):
                self._catalog_loaded(message, connection)
            elif isinstance(message, SwapStarted):
                self._swap_since = time.monotonic()
                self.batcher.swap_started()
            elif isinstance(message, SwapFinished):
                self._swap_finished(message)
            elif isinstance(message, Drift):
                self.metrics.set_drift(message.sites)
            elif isinstance(message, DeviceMemory):
                self.metrics.set_memory(message)
            elif isinstance(message, Ready):
                self._started(message, connection)
            elif isinstance(message, StartFailed):
                raise EngineFailure(message.message, permanent=True)

    def _started(self, message: Ready, connection: Connection) -> None:
        self.ready = message
        logger.info(
            "engine %s on %s is ready: loaded in %.1f s, warmed up in %.1f s",
            message.engine, message.device, message.load_seconds, message.warmup_seconds,
        )  # fmt: skip
        self.metrics.set_dispatch(message.dispatch_source, message.dispatch_reason)
        self.metrics.expect_drift(message.drift_sites)
        self._missing = set(self.extra_catalogs)
        for version in self._missing:
            connection.send(messages.LoadCatalog(version, self.extra_catalogs[version]))
        if not self._missing:
            self._restore_live_catalog(connection)

    def _restore_live_catalog(self, connection: Connection) -> None:
        """The last step of a start: not the first request is to wait for the swap."""
        if self.live_catalog is None:
            self._mark_up()
        else:
            connection.send(messages.SwapCatalog(self.live_catalog))

    def _swap_finished(self, message: SwapFinished) -> None:
        self._swap_since = None
        self.batcher.swap_finished()
        if self._up_since is None:
            if message.error is not None:
                raise EngineFailure(f"catalog {message.version} cannot be made live again: {message.error}")
            self._mark_up()
            return
        future = self._swaps.get(message.version)
        if future is not None and not future.done():
            future.set_result(message)

    def _catalog_loaded(self, message: CatalogLoaded, connection: Connection) -> None:
        future = self._loading.get(message.version)
        if future is not None and not future.done():
            future.set_result(message)
        elif message.version in self._missing:
            if message.error is not None:
                raise EngineFailure(f"catalog {message.version} cannot be read again: {message.error}")
            self._missing.remove(message.version)
            if not self._missing:
                self._restore_live_catalog(connection)

    async def _watch_process(self, connection: Connection) -> None:
        assert connection.process is not None
        status = await connection.process.wait()
        if status == START_FAILED_STATUS:
            await asyncio.sleep(WATCH_SECONDS)  # its last words are on their way
        raise EngineFailure(f"the engine process ended with status {status}")

    async def _watch_clock(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            busy_since, now, limit = self.batcher.busy_since(), time.monotonic(), self.settings.start_timeout
            if self._up_since is None and now - started > limit:
                raise EngineFailure(f"the engine was not ready within {limit:g} s")
            # A catalog that outgrows its room has the engine warm up again, which may take as long as a start.
            if self._swap_since is not None and now - self._swap_since > limit:
                raise EngineFailure(f"the engine hangs: no end of a catalog swap within {limit:g} s")
            if busy_since is not None and now - busy_since > self.settings.batch_timeout:
                raise EngineFailure(f"the engine hangs: no answer to a batch within {self.settings.batch_timeout:g} s")
