"""One log line each few seconds: what was answered, how fast, in what batches. Silent while nothing happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

LARGEST_SAMPLE = 20_000  # latencies kept of one interval; beyond that each second one is dropped


class Window:
    """Counts since the last line."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self.started = time.monotonic()
        self.latencies: list[float] = []
        self.stride = 1
        self.answered = 0
        self.batches = 0
        self.batched_requests = 0
        self.outcomes: Counter[str] = Counter()

    def request(self, outcome: str, seconds: float) -> None:
        """Count one recommendation request; only answers with items have a latency worth a percentile."""
        self.outcomes[outcome] += 1
        if outcome != "ok":
            return
        self.answered += 1
        if self.answered % self.stride == 0:
            self.latencies.append(seconds)
        if len(self.latencies) >= LARGEST_SAMPLE:
            self.latencies = self.latencies[::2]
            self.stride *= 2

    def batch(self, size: int) -> None:
        """Count one batch."""
        self.batches += 1
        self.batched_requests += size

    def line(self, queue_depth: int) -> str | None:
        """The line, or None if nothing happened."""
        if not self.outcomes and not queue_depth:
            return None
        elapsed = max(time.monotonic() - self.started, 1e-9)
        parts = [f"{self.outcomes.total() / elapsed:.1f} req/s"]
        if self.latencies:
            ordered = sorted(self.latencies)
            parts.append(f"p50 {1000 * percentile(ordered, 50):.1f} ms, p99 {1000 * percentile(ordered, 99):.1f} ms")
        if self.batches:
            parts.append(f"mean batch {self.batched_requests / self.batches:.1f}")
        parts.append(f"queue {queue_depth}")
        parts.extend(f"{outcome} {count}" for outcome, count in sorted(self.outcomes.items()))
        return ", ".join(parts)


def percentile(ordered: list[float], percent: float) -> float:
    """Nearest-rank percentile of ascending values."""
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


async def log_summaries(window: Window, queue_depth: Callable[[], int], interval: float) -> None:
    """Log a line each `interval` seconds, for ever."""
    while True:
        await asyncio.sleep(interval)
        line = window.line(queue_depth())
        window.reset()
        if line is not None:
            logger.info(line)
