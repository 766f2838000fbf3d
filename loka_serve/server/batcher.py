"""Dynamic batching in the API process: requests wait at most a moment for company, and two batches are in flight.

There is no loop that could die: each event (a request, an answer, a timer, the engine coming or going) calls `_pump`,
which sends what is due and otherwise sets a timer. A request that is done for (deadline, client gone) leaves at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from loka_serve.server.batch_log import BatchLog
from loka_serve.server.flights import Answer, Flight, record_of
from loka_serve.server.messages import CATALOG, EXCEPTION, INVALID, NAN, Batch, BatchResult, WireRequest
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import CANCELLED, DEADLINE, FAILED, QUEUE_FULL, UNAVAILABLE, ProblemError
from loka_serve.server.queue import BULK, INTERACTIVE, RequestQueue, Ticket
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
CAUTION = 1.25  # of the time that an answer is expected to take: one that comes just too late is work for nothing
LEAD_SHARE, LEAD_SECONDS = 0.1, 0.001  # how long before the engine falls idle the next batch is sent


@dataclass(frozen=True)
class BatchSettings:
    """Seconds and counts that batching goes by.

    Attributes:
        max_cost: requests x widest beam x longest context of a batch.
        queue_share: part of the queue that one tenant, or bulk requests together, may hold.
    """

    max_batch: int
    max_delay: float
    max_queue: int
    max_cost: float = math.inf
    queue_share: float = 1.0


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
    _flights: dict[int, Flight] = field(default_factory=dict)
    _reserved: int = 0
    _up: bool = False
    _swapping: bool = False
    _next_batch_id: int = 0
    _timer: asyncio.TimerHandle | None = None
    _mean_seconds: float = 0.0
    _down_reason: str = "the engine is starting"
    _reserved_by: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._waiting = RequestQueue(self.settings.max_batch, self.settings.max_cost)

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

    def reserve(self, tenant: str = "") -> None:
        """Take a place in the queue before the body is read; `release` gives it back.

        Raises:
            ProblemError: 503 without an engine, 429 if the queue is full, or the tenant's part of it.
        """
        self._check(tenant)
        self._reserved += 1
        if tenant:
            self._reserved_by[tenant] += 1

    def release(self, tenant: str = "") -> None:
        """Give the place back, to leave or to `submit`."""
        self._reserved -= 1
        if tenant:
            self._reserved_by[tenant] -= 1
            if not self._reserved_by[tenant]:
                del self._reserved_by[tenant]

    def submit(
        self,
        wire: WireRequest,
        catalog_version: str,
        arrival: float,
        timeout: float,
        *,
        context: int = 0,
        priority: str = INTERACTIVE,
        tenant: str = "",
    ) -> Ticket:
        """Queue a request that arrived at `arrival` (of time.monotonic) and has `timeout` seconds from then.

        Raises:
            ProblemError: 503 without an engine, 429 if the queue (or the part of it that is open to this tenant and
                priority) is full, or so full that the deadline would pass. One in the past shows in the future.
        """
        self._check(tenant, priority)
        loop = asyncio.get_running_loop()
        deadline = arrival + timeout
        ticket = Ticket(wire, catalog_version, arrival, deadline, loop.create_future(), context, priority, tenant)
        left = deadline - time.monotonic()
        if left <= 0:
            self._expire(ticket)
            return ticket
        self.require_hope(deadline, priority)
        self._waiting.add(ticket)
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
            self.log.add(record_of(batch_id, flight, {}, len(flight.tickets), reason))
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
        record = self.log.add(record_of(message.batch_id, flight, message.timings, failed))
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

    def _check(self, tenant: str = "", priority: str = INTERACTIVE) -> None:
        self.require_up()
        room = self.settings.max_queue
        if self.queue_depth >= room:
            raise self._full("too many requests are waiting")
        part = max(1, int(self.settings.queue_share * room))
        if tenant and self._waiting.held_by(tenant) + self._reserved_by[tenant] >= part:
            raise self._full("too many requests of this tenant are waiting")
        if priority == BULK and self._waiting.held_by(BULK) >= part:
            raise self._full("too many bulk requests are waiting")

    def _full(self, detail: str) -> ProblemError:
        batches = -(-self.queue_depth // self.settings.max_batch)
        return ProblemError(QUEUE_FULL, detail, retry_after=batches * self._mean_seconds)

    def require_hope(self, deadline: float, priority: str) -> None:
        """Refuse at once what would only wait for its deadline, and keep others from theirs: overload ends here.

        An engine without work is always tried: its mean may be one of larger batches.

        Raises:
            ProblemError: 429.
        """
        if priority != INTERACTIVE or not self._mean_seconds or not (self._waiting or self._flights):
            return
        left = deadline - time.monotonic()
        if self._seconds_behind(self._waiting.held_by(INTERACTIVE)) <= left:
            return
        seconds = self._seconds_behind(self._waiting.ahead_of(deadline, INTERACTIVE))
        if seconds > left:
            detail = f"too many requests are waiting: an answer would take {seconds:.3g} s, after its deadline"
            raise ProblemError(QUEUE_FULL, detail, retry_after=seconds - left)

    def _seconds_behind(self, ahead: int) -> float:
        """Until the answer of a request that has so many ahead of it in the queue."""
        started = self.busy_since()
        begun = 0.0 if started is None else min(time.monotonic() - started, self._mean_seconds)
        batches = len(self._flights) + ahead // self.settings.max_batch + 1
        return CAUTION * (batches * self._mean_seconds - begun)

    def _expire(self, ticket: Ticket) -> None:
        where = "in the queue" if ticket.sent is None else "while the request was computed"
        self._fail(ticket, ProblemError(DEADLINE, f"the deadline passed {where}"))

    def _fail(self, ticket: Ticket, error: ProblemError) -> None:
        if not ticket.future.done():
            ticket.future.set_exception(error)
            ticket.future.exception()  # marked as seen: its owner may be gone
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._waiting.remove(ticket)
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
            self._dispatch(self._waiting.take(), now)
            due = None
        self._set_timer(due, now)

    def _due(self) -> float:
        """When to stop waiting for company: after the oldest request's delay, but while the engine is busy there is
        nothing to gain from sending a small batch long before it falls idle."""
        due = self._waiting.oldest.arrival + self.settings.max_delay
        started = self.busy_since()
        if started is None:
            return due
        lead = max(LEAD_SECONDS, LEAD_SHARE * self._mean_seconds)
        return max(due, started + self._mean_seconds - lead)

    def _dispatch(self, tickets: list[Ticket], now: float) -> None:
        batch = Batch(self._next_batch_id, tickets[0].catalog_version, [ticket.wire for ticket in tickets])
        self._next_batch_id += 1
        for ticket in tickets:
            ticket.sent = now
        try:
            self.send(batch)
        except ProblemError as error:
            for ticket in tickets:
                self._fail(ticket, error)
            return
        self._flights[batch.batch_id] = Flight(tickets, batch.catalog_version, now, now)
        self.window.batch(len(tickets))
        lengths = [len(wire.history) for wire in batch.requests]  # in bytes: the ratio is the same
        self.metrics.batch_started(lengths, [wire.beam_width for wire in batch.requests])

    def _set_timer(self, due: float | None, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else asyncio.get_running_loop().call_later(due - now, self._pump)
