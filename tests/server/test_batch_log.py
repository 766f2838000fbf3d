"""The last batches are kept with their sizes, beams, waits and times, answered ones and lost ones."""

from __future__ import annotations

import pytest

from loka_serve.server.batch_log import KEPT_BATCHES
from tests.server.test_batcher import Bench, run


def test_a_batch_is_kept_with_its_shape_and_its_times() -> None:
    async def test() -> None:
        bench = Bench(max_batch=2)
        tickets = [bench.submit(1, beam_width=4), bench.submit(2, beam_width=16)]
        bench.answer(bench.sent[0], seconds=0.03, row_0="nan")
        (record,) = bench.batcher.log.records
        assert (record.batch_id, record.catalog_version, record.size) == (bench.sent[0].batch_id, "v1", 2)
        assert (list(record.beam_widths), record.failed, record.lost) == ([4, 16], 1, "")
        assert record.engine_seconds == 0.03
        assert record.waits == [pytest.approx(bench.waited(ticket), abs=1e-3) for ticket in tickets]
        assert record.finished >= record.started
        assert tickets[1].future.result().batch is record
        shown = record.to_dict()
        assert (shown["size"], shown["beam_widths"], shown["stages_ms"]) == (2, [4, 16], {"total": 30.0})

    run(test)


def test_a_batch_that_the_engine_lost_is_kept_with_the_reason() -> None:
    async def test() -> None:
        bench = Bench(max_batch=1)
        bench.submit(1)
        bench.batcher.engine_down("the engine is restarting")
        (record,) = bench.batcher.log.records
        assert (record.size, record.failed, record.lost) == (1, 1, "the engine is restarting")
        assert record.engine_seconds == 0

    run(test)


def test_only_the_last_ones_are_kept() -> None:
    async def test() -> None:
        bench = Bench(max_batch=1)
        for mark in range(KEPT_BATCHES + 5):
            bench.submit(mark)
            bench.answer(bench.sent[-1])
        kept = [record.batch_id for record in bench.batcher.log.records]
        assert kept == [batch.batch_id for batch in bench.sent][5:]

    run(test)


def test_the_times_of_a_level_are_no_stage_of_the_metrics() -> None:
    async def test() -> None:
        bench = Bench()
        bench.metrics.batch_finished({"decode": 0.02, "decode.0": 0.01, "decode.1": 0.01})
        assert bench.counter("loka_engine_seconds_count", stage="decode") == 1
        assert bench.metrics.registry.get_sample_value("loka_engine_seconds_count", {"stage": "decode.0"}) is None

    run(test)
