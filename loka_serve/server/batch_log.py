"""What the last batches were like, for GET /v1/debug/batches and for the spans of traced requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

KEPT_BATCHES = 100


@dataclass(frozen=True)
class BatchRecord:
    """One batch that is over.

    Attributes:
        beam_widths, waits: of each request; waits in seconds from its arrival to the batch's start.
        failed: requests without items, be it alone or with the whole batch.
        started, finished: of time.monotonic, as the API process saw it.
        timings: seconds by stage (prepare, context, decode, selection, total, expand; decode and selection also by
            level, as `decode.0`), as far as the engine knows them.
        lost: why the engine never answered it; empty if it did.
    """

    batch_id: int
    catalog_version: str
    beam_widths: Sequence[int]
    waits: Sequence[float]
    failed: int
    started: float
    finished: float
    timings: dict[str, float]
    lost: str = ""

    @property
    def size(self) -> int:
        return len(self.beam_widths)

    @property
    def engine_seconds(self) -> float:
        """0 if the engine did not begin it."""
        return self.timings.get("total", 0.0)

    def to_dict(self) -> dict[str, object]:
        """The members of schemas.BatchInfo."""
        return {
            "batch_id": self.batch_id,
            "catalog_version": self.catalog_version,
            "seconds_ago": round(time.monotonic() - self.finished, 3),
            "size": self.size,
            "failed": self.failed,
            "lost": self.lost or None,
            "beam_widths": list(self.beam_widths),
            "queue_ms": [round(1000 * wait, 3) for wait in self.waits],
            "round_trip_ms": round(1000 * (self.finished - self.started), 3),
            "stages_ms": {stage: round(1000 * seconds, 3) for stage, seconds in self.timings.items()},
        }


class BatchLog:
    """The last batches, oldest first."""

    def __init__(self) -> None:
        self.records: deque[BatchRecord] = deque(maxlen=KEPT_BATCHES)

    def add(self, record: BatchRecord) -> BatchRecord:
        """Keep a record, and forget the oldest beyond `KEPT_BATCHES`."""
        self.records.append(record)
        return record
