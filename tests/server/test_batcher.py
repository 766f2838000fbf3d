"""Dynamic batching: what shares a batch, and who leaves when. The test itself is the engine, at the end of `send`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from loka_serve.server.batcher import Batcher, BatchSettings
from loka_serve.server.messages import Batch, BatchResult, WireRequest, WireResult, pack_integers, unpack_integers
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import ProblemError
from loka_serve.server.queue import Ticket
from loka_serve.server.summary import Window

LONG = 60.0


class Bench:
    """A batcher whose batches pile up in `sent` until the test answers them."""

    def __init__(self, max_batch: int = 4, max_delay: float = 0.02, max_queue: int = 100, up: bool = True) -> None:
        self.sent: list[Batch] = []
        self.metrics = ServerMetrics()
        self.batcher = Batcher(BatchSettings(max_batch, max_delay, max_queue), self.sent.append, self.metrics, Window())
        if up:
            self.batcher.engine_up()

    def submit(
        self, mark: int = 0, beam_width: int = 8, timeout: float = LONG, version: str = "v1", **fields: Any
    ) -> Ticket:
        wire = WireRequest(pack_integers([mark] * 3), [], beam_width, 5)
        return self.batcher.submit(wire, version, time.monotonic(), timeout, **fields)

    def answer(self, batch: Batch, seconds: float = 0.01, **errors: str) -> None:
        """Give each request its own mark back as its item; `row_3="nan"` fails row 3."""
        results = [
            WireResult(error=errors[f"row_{row}"])
            if f"row_{row}" in errors
            else WireResult(items=pack_integers(unpack_integers(request.history)[:1]))
            for row, request in enumerate(batch.requests)
        ]
        self.batcher.receive(BatchResult(batch.batch_id, results, {"total": seconds}))

    def waited(self, ticket: Ticket) -> float:
        assert ticket.sent is not None
        return ticket.sent - ticket.arrival

    def counter(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def mark_of(ticket: Ticket) -> int:
    return int(unpack_integers(ticket.future.result().result.items)[0])


def status_of(ticket: Ticket) -> int:
    error = ticket.future.exception()
    assert isinstance(error, ProblemError)
    return error.kind.status


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 10)

    asyncio.run(bounded())


def test_different_beam_widths_share_a_batch_and_each_gets_its_own_answer() -> None:
    async def test() -> None:
        bench = Bench(max_batch=4)
        tickets = [bench.submit(mark, beam_width) for mark, beam_width in ((1, 8), (2, 64), (3, 16), (4, 5))]
        assert [[request.beam_width for request in batch.requests] for batch in bench.sent] == [[8, 64, 16, 5]]
        bench.answer(bench.sent[0])
        assert [mark_of(ticket) for ticket in tickets] == [1, 2, 3, 4]
        assert {ticket.future.result().batch.size for ticket in tickets} == {4}

    run(test)


def test_a_partial_batch_leaves_when_its_oldest_request_has_waited_long_enough() -> None:
    async def test() -> None:
        bench = Bench(max_batch=4, max_delay=0.2)
        first = bench.submit(1)
        await asyncio.sleep(0.1)
        second = bench.submit(2)
        assert bench.sent == []
        while not bench.sent:
            await asyncio.sleep(0.005)
        assert [len(batch.requests) for batch in bench.sent] == [2]
        # Timers of the event loop may come a millisecond early; the second one's own delay would end 100 ms later.
        assert bench.waited(first) >= 0.199
        assert bench.waited(second) < 0.19

    run(test)


def test_at_most_two_batches_are_in_flight_and_an_answer_makes_room() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        for mark in range(6):
            bench.submit(mark)
        assert [len(batch.requests) for batch in bench.sent] == [2, 2]
        assert bench.batcher.queue_depth == 2
        bench.answer(bench.sent[0])
        assert [len(batch.requests) for batch in bench.sent] == [2, 2, 2]
        assert bench.batcher.queue_depth == 0

    run(test)


def test_a_small_batch_waits_for_company_while_the_engine_is_busy() -> None:
    async def test() -> None:
        bench = Bench(max_batch=4, max_delay=0.005)
        bench.submit(0)
        await asyncio.sleep(0.02)
        bench.answer(bench.sent[0], seconds=2.0)  # from now on a batch is expected to take 2 s
        bench.submit(1)
        await asyncio.sleep(0.02)
        assert len(bench.sent) == 2
        bench.submit(2)
        await asyncio.sleep(0.05)  # long past its delay, but it would only wait at the engine
        assert len(bench.sent) == 2
        for mark in (3, 4, 5):
            bench.submit(mark)  # a full batch has nothing to wait for
        assert [len(batch.requests) for batch in bench.sent] == [1, 1, 4]

    run(test)


def test_a_small_batch_is_sent_before_the_engine_falls_idle() -> None:
    async def test() -> None:
        bench = Bench(max_batch=4, max_delay=0.005)
        bench.submit(0)
        await asyncio.sleep(0.02)
        bench.answer(bench.sent[0], seconds=0.1)
        bench.submit(1)
        await asyncio.sleep(0.02)
        bench.submit(2)
        await asyncio.sleep(0.15)  # batch 1 has had its 100 ms and no answer yet
        assert [len(batch.requests) for batch in bench.sent] == [1, 1, 1]

    run(test)


def test_a_deadline_in_the_queue_is_504_at_once_and_frees_the_place() -> None:
    async def test() -> None:
        bench = Bench(max_batch=1, max_queue=1)
        bench.submit(1), bench.submit(2)  # both in flight, unanswered
        late = bench.submit(3, timeout=0.03)
        with pytest.raises(ProblemError) as refused:
            bench.submit(4)
        assert refused.value.kind.status == 429
        started = time.monotonic()
        with pytest.raises(ProblemError):
            await late.future
        assert time.monotonic() - started < 0.5  # while the batches in flight are never answered
        assert status_of(late) == 504
        bench.submit(5)  # does not raise
        bench.answer(bench.sent[0])
        assert unpack_integers(bench.sent[2].requests[0].history)[0] == 5  # the late one is never computed

    run(test)


def test_a_deadline_in_flight_is_504_at_once_and_the_others_are_answered() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        late, patient = bench.submit(1, timeout=0.03), bench.submit(2)
        assert len(bench.sent) == 1
        with pytest.raises(ProblemError):
            await late.future
        assert status_of(late) == 504
        bench.answer(bench.sent[0])
        assert mark_of(patient) == 2
        assert status_of(late) == 504  # the late answer did not overwrite it

    run(test)


def test_a_deadline_that_has_passed_before_submission_is_never_queued() -> None:
    async def test() -> None:
        bench = Bench()
        ticket = bench.batcher.submit(WireRequest(b"", [], 8, 5), "v1", time.monotonic() - 2, 1.0)
        assert status_of(ticket) == 504
        assert bench.batcher.queue_depth == 0

    run(test)


def test_a_client_that_left_is_dropped_from_the_queue_and_ignored_in_flight() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        in_flight, other = bench.submit(1), bench.submit(2)
        queued = bench.submit(3)
        bench.batcher.drop(queued)
        bench.batcher.drop(in_flight)
        assert bench.batcher.queue_depth == 0
        assert (status_of(queued), status_of(in_flight)) == (499, 499)
        bench.answer(bench.sent[0])
        assert mark_of(other) == 2
        assert len(bench.sent) == 1

    run(test)


def test_cancelled_futures_do_not_stop_the_batcher() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        cancelled, other = bench.submit(1), bench.submit(2)
        cancelled.future.cancel()
        bench.answer(bench.sent[0])
        assert mark_of(other) == 2
        following = [bench.submit(3), bench.submit(4)]
        following[0].future.cancel()
        bench.batcher.engine_down("gone")
        bench.batcher.engine_up()
        assert status_of(following[1]) == 503
        last = [bench.submit(5), bench.submit(6)]
        bench.answer(bench.sent[-1])
        assert [mark_of(ticket) for ticket in last] == [5, 6]

    run(test)


def test_a_full_queue_is_429_with_a_time_to_come_back_counting_reserved_places() -> None:
    async def test() -> None:
        bench = Bench(max_batch=1, max_queue=3)
        first = bench.submit(0)
        bench.answer(bench.sent[0], seconds=2.0)
        assert first.future.done()
        for mark in range(4):  # two in flight, two waiting
            bench.submit(mark)
        bench.batcher.reserve()  # a body is being read
        with pytest.raises(ProblemError) as refused:
            bench.batcher.reserve()
        assert refused.value.kind.status == 429
        assert refused.value.headers() == {"Retry-After": "6"}  # three batches of two seconds are before it
        bench.batcher.release()
        bench.batcher.reserve()

    run(test)


def test_without_an_engine_all_are_503_and_new_ones_are_refused_until_it_is_back() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2, up=False)
        with pytest.raises(ProblemError) as starting:
            bench.submit(0)
        assert (starting.value.kind.status, starting.value.headers()) == (503, {"Retry-After": "1"})
        bench.batcher.engine_up()
        tickets = [bench.submit(mark) for mark in range(3)]
        bench.batcher.engine_down("the engine is restarting")
        assert [status_of(ticket) for ticket in tickets] == [503, 503, 503]
        assert (bench.batcher.queue_depth, bench.batcher.batches_in_flight) == (0, 0)
        with pytest.raises(ProblemError, match="the engine is restarting"):
            bench.submit(9)
        bench.batcher.engine_up()
        again = [bench.submit(mark) for mark in (7, 8)]
        bench.answer(bench.sent[-1])
        assert [mark_of(ticket) for ticket in again] == [7, 8]

    run(test)


def test_one_request_without_numbers_among_16_fails_alone() -> None:
    async def test() -> None:
        bench = Bench(max_batch=16)
        tickets = [bench.submit(mark) for mark in range(16)]
        bench.answer(bench.sent[0], row_5="nan")
        assert status_of(tickets[5]) == 500
        assert [mark_of(ticket) for ticket in tickets if ticket is not tickets[5]] == [*range(5), *range(6, 16)]
        assert bench.counter("loka_invalid_answers_total", reason="nan") == 1

    run(test)


def test_a_batch_holds_one_catalog_version() -> None:
    async def test() -> None:
        bench = Bench(max_batch=3, max_delay=0.25)  # longer than a busy machine takes between two requests
        for mark, version in enumerate(("v1", "v1", "v2")):
            bench.submit(mark, version=version)
        assert [(batch.catalog_version, len(batch.requests)) for batch in bench.sent] == [("v1", 2)]
        assert bench.batcher.versions_in_use() == {"v1", "v2"}
        bench.answer(bench.sent[0])
        await asyncio.sleep(0.35)
        assert [(batch.catalog_version, len(batch.requests)) for batch in bench.sent] == [("v1", 2), ("v2", 1)]
        assert bench.batcher.versions_in_use() == {"v2"}

    run(test)


def test_an_answer_that_fits_no_batch_is_refused_and_keeps_the_batch() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        tickets = [bench.submit(1), bench.submit(2)]
        with pytest.raises(ValueError, match="batch 99"):
            bench.batcher.receive(BatchResult(99, [], {}))
        with pytest.raises(ValueError, match="1 results"):
            bench.batcher.receive(BatchResult(bench.sent[0].batch_id, [WireResult()], {}))
        bench.batcher.engine_down("not to be trusted")
        assert [status_of(ticket) for ticket in tickets] == [503, 503]

    run(test)


def test_metrics_of_a_batch() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        bench.submit(1, beam_width=4), bench.submit(2, beam_width=16)
        bench.answer(bench.sent[0], seconds=0.03)
        assert bench.counter("loka_batch_size_sum") == 2
        assert bench.counter("loka_beam_width_sum") == 20
        # 4 + 16 beams in a batch padded to 2 x 16.
        assert bench.counter("loka_padding_ratio_sum", dimension="beam") == pytest.approx(12 / 32)
        assert bench.counter("loka_engine_seconds_sum", stage="total") == pytest.approx(0.03)
        assert bench.counter("loka_queue_seconds_count") == 2

    run(test)


def test_the_time_of_a_swap_is_none_of_a_batch_s_and_what_comes_meanwhile_waits_together() -> None:
    async def test() -> None:
        bench = Bench(max_batch=4, max_delay=0.0)
        first = bench.submit(1)
        await asyncio.sleep(0.01)
        assert len(bench.sent) == 1 and bench.batcher.busy_since() is not None
        bench.batcher.swap_started()
        assert bench.batcher.busy_since() is None
        later = [bench.submit(mark) for mark in (2, 3)]
        short = bench.submit(4, timeout=0.02)
        await asyncio.sleep(0.05)
        assert len(bench.sent) == 1
        assert status_of(short) == 504
        finished = time.monotonic()
        bench.batcher.swap_finished()
        since = bench.batcher.busy_since()
        assert since is not None and since >= finished
        await asyncio.sleep(0.05)
        assert [len(batch.requests) for batch in bench.sent] == [1, 2]
        for batch in bench.sent:
            bench.answer(batch)
        assert [mark_of(ticket) for ticket in (first, *later)] == [1, 2, 3]

    run(test)


def test_an_engine_that_ends_in_a_swap_does_not_hold_up_the_next_one() -> None:
    async def test() -> None:
        bench = Bench(max_delay=0.0)
        bench.batcher.swap_started()
        bench.batcher.engine_down("the engine is restarting")
        bench.batcher.engine_up()
        bench.submit(1)
        await asyncio.sleep(0.01)
        assert len(bench.sent) == 1

    run(test)


def test_a_batch_whose_catalog_the_engine_cannot_take_is_503_and_counts_as_no_wrong_answer() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        tickets = [bench.submit(1), bench.submit(2)]
        (batch,) = bench.sent
        bench.batcher.receive(BatchResult(batch.batch_id, [WireResult(error="catalog")] * 2, {}))
        for ticket in tickets:
            error = ticket.future.exception()
            assert isinstance(error, ProblemError)
            assert (error.kind.status, error.headers()) == (503, {"Retry-After": "1"})
            assert error.detail == "the engine could not go over to catalog v1"
        for reason in ("nan", "invalid", "exception"):
            assert bench.counter("loka_invalid_answers_total", reason=reason) == 0

    run(test)


def test_no_tenant_and_no_bulk_work_holds_more_than_its_part_of_the_queue() -> None:
    async def test() -> None:
        bench = Bench(max_batch=1, max_queue=10)
        bench.batcher.settings = replace(bench.batcher.settings, queue_share=0.4)
        bench.submit(), bench.submit()  # both places of the engine are taken
        for _ in range(3):
            bench.submit(tenant="a")
        bench.batcher.reserve("a")  # a body is being read
        with pytest.raises(ProblemError, match="too many requests of this tenant") as refused:
            bench.batcher.reserve("a")
        assert refused.value.kind.status == 429
        bench.batcher.release("a")
        bench.submit(tenant="a")
        with pytest.raises(ProblemError, match="too many requests of this tenant"):
            bench.submit(tenant="a")
        for _ in range(4):
            bench.submit(tenant="b", priority="bulk")
        with pytest.raises(ProblemError, match="too many bulk requests"):
            bench.submit(priority="bulk")
        bench.submit(), bench.submit()  # the rest is open to others
        with pytest.raises(ProblemError, match="too many requests are waiting"):
            bench.submit()

    run(test)


def test_what_cannot_be_answered_before_its_deadline_is_refused_at_once() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        for mark in range(4):
            bench.submit(mark)
        bench.answer(bench.sent[0], seconds=1.0)  # a batch takes a second
        for mark in range(4, 8):
            bench.submit(mark)  # with the batch in flight: answered after two and three seconds
        with pytest.raises(ProblemError, match="after its deadline") as refused:
            bench.submit(8, timeout=2.0)
        assert refused.value.kind.status == 429 and 0.5 < (refused.value.retry_after or 0.0) < 2.5
        late = bench.submit(9, timeout=30.0)
        soon = bench.submit(10, timeout=4.5)  # goes before those of a minute
        bench.answer(bench.sent[1], seconds=1.0)
        bench.answer(bench.sent[2], seconds=1.0)
        assert mark_of(soon) == 10 if soon.future.done() else soon.sent is not None
        assert late.sent is not None and not late.future.done()

    run(test)


def test_an_idle_engine_is_tried_whatever_its_mean_says() -> None:
    async def test() -> None:
        bench = Bench(max_batch=1)
        bench.submit(1)
        bench.answer(bench.sent[0], seconds=5.0)
        ticket = bench.submit(2, timeout=1.0)
        bench.answer(bench.sent[1])
        assert mark_of(ticket) == 2

    run(test)
