"""The policy that forms batches."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

from loka_serve.server.messages import WireRequest
from loka_serve.server.queue import BULK, INTERACTIVE, RequestQueue, Ticket


def make_ticket(mark: int, deadline: float = 1.0, beam: int = 8, **fields: Any) -> Ticket:
    version = fields.pop("version", "v1")
    future = cast("asyncio.Future[Any]", None)
    return Ticket(WireRequest(b"", [mark], beam, 5), version, 0.0, deadline, future, **fields)


def marks(tickets: list[Ticket]) -> list[int]:
    return [ticket.wire.features[0] for ticket in tickets]


def filled(queue: RequestQueue, *tickets: Ticket) -> RequestQueue:
    for ticket in tickets:
        queue.add(ticket)
    return queue


def test_the_nearest_deadline_goes_first_and_equal_ones_in_the_order_of_arrival() -> None:
    queue = filled(RequestQueue(2), *(make_ticket(mark, deadline) for mark, deadline in enumerate([5, 3, 9, 3, 1])))
    assert [marks(queue.take()) for _ in range(3)] == [[4, 1], [3, 0], [2]]
    assert not queue and len(queue) == 0


def test_one_that_left_is_never_taken_and_leaves_nothing_behind() -> None:
    queue, gone = RequestQueue(8), make_ticket(1, tenant="a")
    filled(queue, make_ticket(0), gone, make_ticket(2))
    queue.remove(gone)
    queue.remove(gone)  # again: no error
    assert gone not in queue and queue.held_by("a") == 0 and queue.held_by(INTERACTIVE) == 2
    assert marks(queue.take()) == [0, 2]
    assert queue.held_by(INTERACTIVE) == 0 and not queue._lanes and not queue._held


def test_a_batch_is_bounded_by_what_it_costs_when_padded() -> None:
    wide = {"beam": 64, "context": 99}
    queue = RequestQueue(8, max_cost=4 * 8 * 100)
    filled(queue, *(make_ticket(mark, mark, context=99) for mark in range(3)), make_ticket(3, 3, **wide))
    filled(queue, make_ticket(4, 4, context=9))
    assert marks(queue.take()) == [0, 1, 2, 4]  # the wide one would make four times 64 x 100
    assert marks(queue.take()) == [3]  # alone it is beyond the bound, too, and goes all the same


def test_tenants_share_the_engine_however_much_one_asks_for() -> None:
    queue = filled(RequestQueue(4), *(make_ticket(mark, tenant="flood") for mark in range(100)))
    filled(queue, *(make_ticket(100 + mark, tenant="small") for mark in range(6)))
    taken = [mark >= 100 for _ in range(3) for mark in marks(queue.take())]
    assert sum(taken) == 6 and sum(taken[:4]) == 2
    # One that comes later has saved up nothing: it shares from now on.
    for _ in range(10):
        queue.take()
    filled(queue, *(make_ticket(200 + mark, tenant="late") for mark in range(20)))
    assert sum(mark >= 200 for _ in range(4) for mark in marks(queue.take())) == 8


def test_costly_requests_are_weighed_by_their_work() -> None:
    queue = filled(RequestQueue(1), *(make_ticket(mark, beam=32, tenant="wide") for mark in range(20)))
    filled(queue, *(make_ticket(100 + mark, beam=8, tenant="narrow") for mark in range(20)))
    taken = [queue.take()[0].tenant for _ in range(20)]
    assert taken.count("wide") == 4  # four times the work each


def test_bulk_requests_get_a_tenth_and_never_starve() -> None:
    queue = filled(RequestQueue(10), *(make_ticket(mark, 0.1) for mark in range(100)))
    filled(queue, *(make_ticket(1000 + mark, 99.0, priority=BULK) for mark in range(20)))
    batches = [marks(queue.take()) for _ in range(5)]
    assert sum(mark >= 1000 for batch in batches for mark in batch) == 5
    queue = filled(RequestQueue(10), *(make_ticket(mark, priority=BULK) for mark in range(20)))
    assert len(queue.take()) == 10  # alone, they have everything


def test_batches_are_of_one_version_the_one_that_waits_longest_first() -> None:
    queue = filled(RequestQueue(4), make_ticket(0, 9.0), make_ticket(1, 1.0, version="v2"), make_ticket(2, 5.0))
    assert [marks(queue.take()) for _ in range(2)] == [[2, 0], [1]]


def test_whatever_comes_and_goes_every_request_is_taken_once() -> None:
    generator, queue = random.Random(0), RequestQueue(5, max_cost=3000)
    waiting: set[Ticket] = set()
    taken = removed = 0
    for mark in range(3000):
        ticket = make_ticket(
            mark, generator.random(), generator.choice((4, 64)), context=generator.choice((0, 50)),
            priority=generator.choice((INTERACTIVE, BULK)), tenant=generator.choice(("", "a", "b")),
            version=f"v{mark // 1000}",
        )  # fmt: skip
        queue.add(ticket)
        waiting.add(ticket)
        if generator.random() < 0.2:
            gone = generator.choice(list(waiting))
            queue.remove(gone)
            waiting.remove(gone)
            removed += 1
        if generator.random() < 0.4 and waiting:
            batch = queue.take()
            assert 1 <= len(batch) <= 5 and set(batch) <= waiting
            assert len({ticket.catalog_version for ticket in batch}) == 1
            waiting -= set(batch)
            taken += len(batch)
        assert len(queue) == len(waiting)
    while queue:
        taken += len(queue.take())
    assert taken + removed == 3000 and not queue._lanes and not queue._held
