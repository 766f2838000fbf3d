"""Load on a bundle's engine through the server's own batcher and engine process, and what it costs in time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from loka_serve.errors import EngineError
from loka_serve.server.batcher import Batcher, BatchSettings
from loka_serve.server.engine_client import EngineClient
from loka_serve.server.engine_connection import EngineSettings
from loka_serve.server.messages import WireRequest
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import ProblemError
from loka_serve.server.summary import Window

LEAST_REQUESTS = 100
"""Requests of a measurement, so that a 99th percentile is more than a guess."""
LONGEST_STRETCH = 20
"""A measurement ends after so many times its seconds, however few requests were answered."""
HOPELESS_REQUESTS = 8
"""A load is given up once so many requests in a row took longer than the bound."""
ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Setting:
    """One choice of what is tuned."""

    max_batch: int
    max_delay_ms: float
    beam_width: int


@dataclass(frozen=True)
class Point:
    """What one load on one setting gave; times from arrival in the queue to the answer, without HTTP.

    Attributes:
        load: in words: ``8 clients`` that ask again at once, or ``arrivals at 120/s`` at random times.
        requests: answered and counted, after a warm-up.
        mean_batch: requests that a request's batch held, averaged over requests.
    """

    setting: Setting
    load: str
    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    mean_batch: float


class Load:
    """A running engine that takes loads, one after the other."""

    def __init__(self, client: EngineClient, version: str, requests: Sequence[WireRequest], seed: int) -> None:
        self._client = client
        self._version = version
        self._requests = requests
        self._generator = np.random.default_rng(seed)
        self._next = 0

    async def closed(self, setting: Setting, clients: int, seconds: float, bound_ms: float) -> Point:
        """`clients` that each ask again as soon as they have their answer.

        Ends early once it is plain that the bound is not met.

        Raises:
            EngineError: the engine failed.
        """
        record = _Record(bound_ms / 1000)
        batcher = self._batcher(setting)
        deadline = time.monotonic() + LONGEST_STRETCH * seconds

        async def client() -> None:
            while not record.is_over(seconds) and time.monotonic() < deadline:
                record.add(*await self._ask(batcher, setting))

        await self._ask(batcher, setting)  # what a first batch of its kind costs is no request's usual time
        record.start()
        await _together([client() for _ in range(clients)])
        return record.point(setting, f"{clients} clients")

    async def open(self, setting: Setting, per_second: float, seconds: float) -> Point:
        """Arrivals at random times (a Poisson process), whether or not the answers keep up.

        Raises:
            EngineError: the engine failed.
        """
        record = _Record(float("inf"))
        batcher = self._batcher(setting)
        count = min(max(LEAST_REQUESTS, round(seconds * per_second)), round(LONGEST_STRETCH * seconds * per_second) + 1)
        arrivals = np.cumsum(self._generator.exponential(1.0 / per_second, count))
        record.start()
        started = time.monotonic()

        async def arrive(after: float) -> None:
            await asyncio.sleep(max(0.0, started + after - time.monotonic()))
            record.add(*await self._ask(batcher, setting))

        await _together([arrive(float(after)) for after in arrivals])
        return record.point(setting, f"arrivals at {per_second:.4g}/s")

    async def _ask(self, batcher: Batcher, setting: Setting) -> tuple[float, int]:
        """(seconds, requests of its batch) of the next request."""
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        wire = replace_beam(request, setting.beam_width)
        arrival = time.monotonic()
        try:
            answer = await batcher.submit(wire, self._version, arrival, ANSWER_SECONDS).future
        except ProblemError as error:
            raise EngineError(f"{setting}: the engine failed: {error}") from error
        return time.monotonic() - arrival, answer.batch.size

    def _batcher(self, setting: Setting) -> Batcher:
        settings = BatchSettings(setting.max_batch, setting.max_delay_ms / 1000, max_queue=1 << 20)
        batcher = Batcher(settings, self._client.send_batch, self._client.metrics, Window())
        self._client.batcher = batcher  # nothing is in flight between two loads, so the old one is owed no answer
        batcher.engine_up()
        return batcher


@asynccontextmanager
async def running_load(
    command: Sequence[str], start_timeout: float, version: str, requests: Sequence[WireRequest], seed: int
) -> AsyncIterator[Load]:
    """Start an engine process and stop it at the end of the block.

    Args:
        command: starts the engine, as in `loka_serve.server.state.engine_command`.
        version: of the bundle's catalog.
        requests: asked for in turn; their beam width is the setting's.

    Raises:
        EngineError: the engine does not start.
    """
    settings = EngineSettings(command, "warning", start_timeout, batch_timeout=ANSWER_SECONDS, restarts=0)
    client = EngineClient(settings, ServerMetrics())
    client.batcher = Batcher(BatchSettings(1, 0.0, 1), client.send_batch, client.metrics, Window())
    failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    client.on_give_up = lambda reason, permanent: None if failure.done() else failure.set_result(reason)
    supervision = asyncio.ensure_future(client.run())
    try:
        while not _is_up(client.batcher):
            if failure.done():
                raise EngineError(f"the engine does not start: {failure.result()}")
            await asyncio.sleep(0.02)
        yield Load(client, version, requests, seed)
    finally:
        client.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(supervision), 10.0)
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)


def replace_beam(request: WireRequest, beam_width: int) -> WireRequest:
    """The same request with other beams, and no more items than beams."""
    return msgspec.structs.replace(request, beam_width=beam_width, num_items=min(request.num_items, beam_width))


def _is_up(batcher: Batcher) -> bool:
    try:
        batcher.require_up()
    except ProblemError:
        return False
    return True


async def _together(coroutines: Sequence[Coroutine[None, None, None]]) -> None:
    """All of them; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Record:
    """Times of the requests of one load."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._seconds: list[float] = []
        self._batches: list[int] = []

    def start(self) -> None:
        self._started = self._ended = time.monotonic()

    def add(self, seconds: float, batch: int) -> None:
        self._seconds.append(seconds)
        self._batches.append(batch)
        self._ended = time.monotonic()

    def is_over(self, seconds: float) -> bool:
        if len(self._seconds) >= HOPELESS_REQUESTS and min(self._seconds) > self._bound:
            return True
        return len(self._seconds) >= LEAST_REQUESTS and time.monotonic() - self._started >= seconds

    def point(self, setting: Setting, load: str) -> Point:
        milliseconds = 1000 * np.array(self._seconds)
        return Point(
            setting=setting,
            load=load,
            requests=len(milliseconds),
            requests_per_second=len(milliseconds) / (self._ended - self._started),
            p50_ms=float(np.quantile(milliseconds, 0.5)),
            # Of few requests the slowest one: better too careful than too hopeful.
            p99_ms=float(np.quantile(milliseconds, 0.99, method="higher")),
            mean_batch=float(np.mean(self._batches)),
        )
