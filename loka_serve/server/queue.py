"""Which waiting requests make the next batch: a policy without a clock or an engine.

Between interactive and bulk requests, and between the tenants of each, start-time fair queuing (Goyal et al., SIGCOMM
1996) shares the engine's work; within one tenant the nearest deadline goes first. A batch is padded to its longest
history and its widest beam, so it is bounded by what it costs then, not only by its number of requests.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loka_serve.server.messages import WireRequest

INTERACTIVE, BULK = "interactive", "bulk"
SHARES = {INTERACTIVE: 9.0, BULK: 1.0}
"""Of the engine's work while both kinds wait; one that waits alone has all of it."""
LOOK_AHEAD = 4  # batches' worth of requests that are looked through for some that fit beside the first


@dataclass(eq=False)
class Ticket:
    """A request on its way: in the queue (`sent` None) or in a batch.

    Attributes:
        arrival, deadline: seconds of time.monotonic.
        context: history items that the model reads.
        future: an Answer or a ProblemError.
    """

    wire: WireRequest
    catalog_version: str
    arrival: float
    deadline: float
    future: asyncio.Future[Any]
    context: int = 0
    priority: str = INTERACTIVE
    tenant: str = ""
    timer: asyncio.TimerHandle | None = None
    sent: float | None = None

    @property
    def cost(self) -> int:
        """Its own work: beams x slots of its context."""
        return self.wire.beam_width * (self.context + 1)


@dataclass
class _Lane:
    """The waiting requests of one tenant and priority; those that left are still in the heap, and skipped."""

    heap: list[tuple[float, int, Ticket]] = field(default_factory=list)
    waiting: int = 0


@dataclass
class RequestQueue:
    """Waiting requests.

    Attributes:
        max_batch: requests of a batch.
        max_cost: requests x widest beam x longest context of a batch; a single request may exceed it.
    """

    max_batch: int
    max_cost: float = math.inf
    _waiting: dict[Ticket, None] = field(default_factory=dict)  # in the order of arrival
    _lanes: dict[tuple[str, str], _Lane] = field(default_factory=dict)
    _work: dict[str | tuple[str, str], float] = field(default_factory=dict)  # virtual time of a priority or a lane
    _clock: dict[str, float] = field(default_factory=dict)  # virtual time of the last one chosen, of each contest
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _held: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Any:
        return iter(self._waiting)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._waiting

    @property
    def oldest(self) -> Ticket:
        """The one that arrived first; the queue is not empty."""
        return next(iter(self._waiting))

    def held_by(self, tenant_or_priority: str) -> int:
        """Waiting requests of a tenant, or of a priority."""
        return self._held[tenant_or_priority]

    def ahead_of(self, deadline: float, priority: str) -> int:
        """Waiting requests of a priority whose deadline is not later."""
        return sum(ticket.priority == priority and ticket.deadline <= deadline for ticket in self._waiting)

    def add(self, ticket: Ticket) -> None:
        """Take a request in; one that starts to wait gains nothing from the time that it did not."""
        key = (ticket.priority, ticket.tenant)
        lane = self._lanes.setdefault(key, _Lane())
        if not self._held[ticket.priority]:
            self._catch_up(ticket.priority, "")
        if not lane.waiting:
            self._catch_up(key, ticket.priority)
        self._waiting[ticket] = None
        lane.waiting += 1
        self._held.update((ticket.priority, ticket.tenant) if ticket.tenant else (ticket.priority,))
        heapq.heappush(lane.heap, (ticket.deadline, next(self._numbers), ticket))

    def remove(self, ticket: Ticket) -> None:
        """Forget a request, wherever it is; one that does not wait is no error."""
        if ticket not in self._waiting:
            return
        del self._waiting[ticket]
        self._held.subtract((ticket.priority, ticket.tenant) if ticket.tenant else (ticket.priority,))
        key = (ticket.priority, ticket.tenant)
        lane = self._lanes[key]
        lane.waiting -= 1
        if not lane.waiting:
            del self._lanes[key]
            self._held = +self._held  # tenants that are gone take no room
            if self._work.get(key, 0.0) <= self._clock.get(ticket.priority, 0.0):
                self._work.pop(key, None)

    def take(self) -> list[Ticket]:
        """Remove and return the next batch; the queue is not empty.

        All are of the catalog version that waits longest, so that the engine never goes back to an older one.
        """
        version = self.oldest.catalog_version
        taken: list[Ticket] = []
        aside: list[tuple[tuple[str, str], tuple[float, int, Ticket]]] = []
        beam = context = 0
        while len(taken) < self.max_batch and len(aside) < LOOK_AHEAD * self.max_batch:
            key = self._next_lane()
            if key is None:
                break
            entry = heapq.heappop(self._lanes[key].heap)
            ticket = entry[2]
            widest, longest = max(beam, ticket.wire.beam_width), max(context, ticket.context)
            fits = not taken or (len(taken) + 1) * widest * (longest + 1) <= self.max_cost
            if ticket.catalog_version != version or not fits:
                aside.append((key, entry))
                continue
            beam, context = widest, longest
            self._charge(key, ticket)
            taken.append(ticket)
            self.remove(ticket)
        for key, entry in aside:
            heapq.heappush(self._lanes[key].heap, entry)
        return taken

    def _next_lane(self) -> tuple[str, str] | None:
        """Of the priority that is furthest behind, the tenant that is; None once no heap holds a waiting request."""
        open_lanes = [key for key, lane in self._lanes.items() if self._has_next(lane)]
        if not open_lanes:
            return None
        return min(open_lanes, key=lambda key: (self._work.get(key[0], 0.0), self._work.get(key, 0.0)))

    def _has_next(self, lane: _Lane) -> bool:
        while lane.heap and lane.heap[0][2] not in self._waiting:
            heapq.heappop(lane.heap)
        return bool(lane.heap)

    def _charge(self, key: tuple[str, str], ticket: Ticket) -> None:
        """Advance the virtual times; the clock of each contest is the winner's before."""
        priority = key[0]
        for contest, entrant, share in (("", priority, SHARES[priority]), (priority, key, 1.0)):
            before = self._work.get(entrant, 0.0)
            self._clock[contest] = max(self._clock.get(contest, 0.0), before)
            self._work[entrant] = before + ticket.cost / share

    def _catch_up(self, entrant: str | tuple[str, str], contest: str) -> None:
        self._work[entrant] = max(self._work.get(entrant, 0.0), self._clock.get(contest, 0.0))
