"""Batches at the engine, and what comes back of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from loka_serve.server.batch_log import BatchRecord
from loka_serve.server.messages import WireResult
from loka_serve.server.queue import Ticket


@dataclass(frozen=True)
class Answer:
    """What the engine gave for one request, how long it waited, and the batch that it shared."""

    result: WireResult
    queue_seconds: float
    batch: BatchRecord


@dataclass
class Flight:
    """A batch on its way."""

    tickets: list[Ticket]
    catalog_version: str
    sent: float
    started: float  # when the engine began it: batches run one after the other


def record_of(batch_id: int, flight: Flight, timings: dict[str, float], failed: int, lost: str = "") -> BatchRecord:
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
