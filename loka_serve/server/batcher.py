"""Dynamic batching in the API process: requests wait at most a moment for company, and two batches are in flight.

There is no loop that could die: each event (a request, an answer, a timer, the engine coming or going) calls `_pump`,
which sends what is due and otherwise sets a timer. A request that is done for (deadline, client gone) leaves at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loka_serve.server.batch_log import BatchLog, BatchRecord
from loka_serve.server.messages import CATALOG, EXCEPTION, INVALID, NAN, Batch, BatchResult, WireRequest, WireResult
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import CANCELLED, DEADLINE, FAILED, QUEUE_FULL, UNAVAILABLE, ProblemError
from loka_serve.server.summary import Window

MAX_IN_FLIGHT = 2
RETRY_SECONDS = 1.0
TIMER_SECONDS = 0.0005  # the event loop's timers count whole milliseconds and may come this much early
SMOOTHING = 0.2  # weight of the newest batch in the running mean of engine seconds
FAILURES = {
    NAN: "the model's scores for this request are not numbers",
    INVALID: "the engine's answer to this request was not valid",
    EXCEPTION: "the engine could not compute this request",
}
LEAD_SHARE, LEAD_SECONDS = 0.1, 0.001  # how long before the engine falls idle the next batch is sent


@dataclass(frozen=True)
class Answer:
    """What the engine gave for one request, how long it waited, and the batch that it shared."""

    result: WireResult
    queue_seconds: float
    batch: BatchRecord


@dataclass(eq=False)
class Ticket:
    """A request on its way: in the queue (`sent` None) or in a batch. `future` is an Answer or a ProblemError."""

    wire: WireRequest
    catalog_version: str
    arrival: float
    future: asyncio.Future[Answer]
    timer: asyncio.TimerHandle | None = None
    sent: float | None = None


@dataclass
class _Flight:
    tickets: list[Ticket]
    catalog_version: str
    sent: float
    started: float  # when the engine began it: batches run one after the other


@dataclass(frozen=True)
class BatchSettings:
    """Seconds and counts that batching goes by."""

    max_batch: int
    max_delay: float
    max_queue: int


@dataclass
class Batcher:
    """Collects requests into batches, sends them, and gives the answers back.

    Attributes:
        send: hands a batch to the engine without blocking; raises ProblemError when it cannot.
    """

    settings: BatchSettings
    send: Callable[[Batch], None]
    metrics: ServerMetrics
    window: Window
    log: BatchLog = field(default_factory=BatchLog)
    _waiting: dict[Ticket, None] = field(default_factory=dict)  # a queue that is ordered and forgets in O(1)
    _flights: dict[int, _Flight] = field(default_factory=dict)
    _reserved: int = 0
    _up: bool = False
    _swapping: bool = False
    _next_batch_id: int = 0
    _timer: asyncio.TimerHandle | None = None
    _mean_seconds: float = 0.0
    _down_reason: str = "the engine is starting"

    @property
    def queue_depth(self) -> int:
        """Requests that wait, or that are being read and will."""
        return len(self._waiting) + self._reserved

    @property
    def batches_in_flight(self) -> int:
        return len(self._flights)

    def require_up(self) -> None:
        """Raises ProblemError (503) without an engine."""
        if not self._up:
            raise ProblemError(UNAVAILABLE, self._down_reason, retry_after=RETRY_SECONDS)

    def reserve(self) -> None:
        """Take a place in the queue before the body is read; `release` gives it back.

        Raises:
            ProblemError: 503 without an engine, 429 if the queue is full.
        """
        self._check()
        self._reserved += 1

    def release(self) -> None:
        """Give the place back, to leave or to `submit`."""
        self._reserved -= 1

    def submit(self, wire: WireRequest, catalog_version: str, arrival: float, timeout: float) -> Ticket:
        """Queue a request that arrived at `arrival` (of time.monotonic) and has `timeout` seconds from then.

        Raises:
            ProblemError: 503 without an engine, 429 if the queue is full. A deadline in the past shows in the future.
        """
        self._check()
        loop = asyncio.get_running_loop()
        ticket = Ticket(wire, catalog_version, arrival, loop.create_future())
        left = arrival + timeout - time.monotonic()
        if left <= 0:
            self._expire(ticket)
            return ticket
        self._waiting[ticket] = None
        ticket.timer = loop.call_later(left, self._expire, ticket)
        self._pump()
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """The client went away: leave the queue at once, or ignore the answer."""
        self._fail(ticket, ProblemError(CANCELLED, "the client went away"))

    def versions_in_use(self) -> set[str]:
        """Catalog versions that requests in the queue or in flight were resolved against."""
        waiting = {ticket.catalog_version for ticket in self._waiting}
        return waiting | {flight.catalog_version for flight in self._flights.values()}

    def busy_since(self) -> float | None:
        """Since when (of time.monotonic) the engine computes its present batch; None when it is idle or swaps."""
        if self._swapping:
            return None
        return next((flight.started for flight in self._flights.values()), None)

    def swap_started(self) -> None:
        """The engine goes over to another catalog: what it has waits, and what comes is better kept together here."""
        self._swapping = True

    def swap_finished(self) -> None:
        """The engine computes again; the time of the swap is none of a batch's."""
        self._swapping = False
        now = time.monotonic()
        for flight in self._flights.values():
            flight.started = now
        self._pump()

    def engine_up(self) -> None:
        """The engine takes batches from now on."""
        self._up = True
        self._mean_seconds = 0.0
        self._pump()

    def engine_down(self, reason: str) -> None:
        """The engine takes none: every request in the queue and in flight is answered 503, and so are new ones."""
        self._up = self._swapping = False
        self._down_reason = reason
        for batch_id, flight in self._flights.items():
            self.log.add(_record(batch_id, flight, {}, len(flight.tickets), reason))
        tickets = [*self._waiting, *(ticket for flight in self._flights.values() for ticket in flight.tickets)]
        self._flights.clear()
        for ticket in tickets:
            self._fail(ticket, ProblemError(UNAVAILABLE, reason, retry_after=RETRY_SECONDS))
        self._set_timer(None, 0.0)

    def receive(self, message: BatchResult) -> None:
        """Give the answers of a batch to those who still wait for them.

        Raises:
            ValueError: an answer that fits no batch in flight; the engine is not to be trusted any more.
        """
        flight = self._flights.get(message.batch_id)
        if flight is None or len(flight.tickets) != len(message.results):
            raise ValueError(f"an answer to batch {message.batch_id} with {len(message.results)} results")
        del self._flights[message.batch_id]
        now = time.monotonic()
        for following in self._flights.values():
            following.started = now
        engine_seconds = message.timings.get("total", 0.0)  # 0: the engine did not begin it
        if engine_seconds:
            self._mean_seconds += (SMOOTHING if self._mean_seconds else 1.0) * (engine_seconds - self._mean_seconds)
        self.metrics.batch_finished(message.timings)
        failed = sum(result.error is not None for result in message.results)
        record = self.log.add(_record(message.batch_id, flight, message.timings, failed))
        for ticket, result in zip(flight.tickets, message.results, strict=True):
            self.metrics.queue_seconds.observe(flight.started - ticket.arrival)
            if result.error == CATALOG:
                detail = f"the engine could not go over to catalog {flight.catalog_version}"
                self._fail(ticket, ProblemError(UNAVAILABLE, detail, retry_after=RETRY_SECONDS))
                continue
            if result.error is not None:
                self.metrics.invalid_answers.labels(result.error).inc()
                self._fail(ticket, ProblemError(FAILED, FAILURES[result.error]))
                continue
            answer = Answer(result, flight.started - ticket.arrival, record)
            if not ticket.future.done():
                ticket.future.set_result(answer)
            self._forget(ticket)
        self._pump()

    def _check(self) -> None:
        self.require_up()
        if self.queue_depth >= self.settings.max_queue:
            batches = -(-self.queue_depth // self.settings.max_batch)
            raise ProblemError(QUEUE_FULL, "too many requests are waiting", retry_after=batches * self._mean_seconds)

    def _expire(self, ticket: Ticket) -> None:
        where = "in the queue" if ticket.sent is None else "while the request was computed"
        self._fail(ticket, ProblemError(DEADLINE, f"the deadline passed {where}"))

    def _fail(self, ticket: Ticket, error: ProblemError) -> None:
        if not ticket.future.done():
            ticket.future.set_exception(error)
            ticket.future.exception()  # marked as seen: its owner may be gone
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket, None)
        if ticket.timer is not None:
            ticket.timer.cancel()

    def _pump(self) -> None:
        """Send every batch that is due, and come back when the next one is."""
        due: float | None = None
        now = time.monotonic()
        while self._up and not self._swapping and self._waiting and len(self._flights) < MAX_IN_FLIGHT:
            due = self._due()
            if len(self._waiting) < self.settings.max_batch and now + TIMER_SECONDS < due:
                break
            self._dispatch(self._take(), now)
            due = None
        self._set_timer(due, now)

    def _due(self) -> float:
        """When to stop waiting for company: after the oldest request's delay, but while the engine is busy there is
        nothing to gain from sending a small batch long before it falls idle."""
        oldest = next(iter(self._waiting))
        due = oldest.arrival + self.settings.max_delay
        started = self.busy_since()
        if started is None:
            return due
        lead = max(LEAD_SECONDS, LEAD_SHARE * self._mean_seconds)
        return max(due, started + self._mean_seconds - lead)

    def _take(self) -> list[Ticket]:
        """The oldest requests that share a catalog version, at most a full batch."""
        tickets: list[Ticket] = []
        for ticket in self._waiting:
            if len(tickets) == self.settings.max_batch or (
                tickets and ticket.catalog_version != tickets[0].catalog_version
            ):
                break
            tickets.append(ticket)
        return tickets

    def _dispatch(self, tickets: list[Ticket], now: float) -> None:
        batch = Batch(self._next_batch_id, tickets[0].catalog_version, [ticket.wire for ticket in tickets])
        self._next_batch_id += 1
        for ticket in tickets:
            ticket.sent = now
            del self._waiting[ticket]
        try:
            self.send(batch)
        except ProblemError as error:
            for ticket in tickets:
                self._fail(ticket, error)
            return
        self._flights[batch.batch_id] = _Flight(tickets, batch.catalog_version, now, now)
        self.window.batch(len(tickets))
        lengths = [len(wire.history) for wire in batch.requests]  # in bytes: the ratio is the same
        self.metrics.batch_started(lengths, [wire.beam_width for wire in batch.requests])

    def _set_timer(self, due: float | None, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else asyncio.get_running_loop().call_later(due - now, self._pump)


def _record(batch_id: int, flight: _Flight, timings: dict[str, float], failed: int, lost: str = "") -> BatchRecord:
    """What is kept of a batch that is over now."""
    return BatchRecord(
        batch_id=batch_id,
        catalog_version=flight.catalog_version,
        beam_widths=[ticket.wire.beam_width for ticket in flight.tickets],
        waits=[flight.started - ticket.arrival for ticket in flight.tickets],
        failed=failed,
        started=flight.started,
        finished=time.monotonic(),
        timings=timings,
        lost=lost,
    )
