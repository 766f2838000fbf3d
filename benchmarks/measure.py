"""Latency, throughput and energy of an engine at one batch shape."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from benchmarks.decoders import Decoder
from benchmarks.power import PowerMeter
from loka_serve.engines.base import EngineRequest, RequestBatch
from loka_serve.models.config import OneRecV2Config

BATCHES = 4  # different ones, in turn
WARMUP_CALLS = 2
LEAST_CALLS = 5
ONE_AFTER_ANOTHER, TWO_IN_FLIGHT = "one after another", "two in flight"


@dataclass(frozen=True)
class Measurement:
    """What one shape took.

    Attributes:
        latency_ms_p50, latency_ms_p99: of a batch alone, from arrays on the host to results on the host.
        calls: how many of them; with few, p99 is nearly the slowest.
        req_per_s: requests a second, the better of the two ways to drive the engine.
        req_per_s_mode: that way, "one after another" or "two in flight".
        joules_per_request: of the whole GPU while driven that way; None where it is not known.
    """

    latency_ms_p50: float
    latency_ms_p99: float
    calls: int
    req_per_s: float
    req_per_s_mode: str
    joules_per_request: float | None


def random_batches(config: OneRecV2Config, batch: int, beam: int, context: int, seed: int = 0) -> list[RequestBatch]:
    """Batches of full histories with codes drawn evenly from the codebooks."""
    generator = np.random.default_rng(seed)
    sizes = np.array(config.codebook_sizes)

    def request() -> EngineRequest:
        history = generator.integers(0, sizes, (context, config.levels)).astype(np.int32)
        return EngineRequest(history, np.zeros(len(config.features), np.int32), beam)

    return [RequestBatch(tuple(request() for _ in range(batch))) for _ in range(BATCHES)]


def measure(
    decoder: Decoder, batches: Sequence[RequestBatch], seconds: float, meter: PowerMeter | None = None
) -> Measurement:
    """Drive a decoder for `seconds` in each of the two ways, and for `LEAST_CALLS` batches however long these take.

    The shape's bucket is captured already. All batches have the same size.

    Raises:
        RuntimeError: the results are no answers, so their time says nothing.
    """
    for call in range(WARMUP_CALLS):
        result = decoder.collect(decoder.submit(batches[call % len(batches)]))
        if result.failed.any() or not result.counts.all():
            raise RuntimeError(f"requests without an answer: failed {result.failed}, leaves {result.counts}")

    latencies: list[float] = []
    with meter or nullcontext():
        start = now = time.perf_counter()
        while now - start < seconds or len(latencies) < LEAST_CALLS:
            decoder.collect(decoder.submit(batches[len(latencies) % len(batches)]))
            before, now = now, time.perf_counter()
            latencies.append(now - before)
    rates = [(len(latencies) / (now - start), ONE_AFTER_ANOTHER, meter.watts() if meter else None)]

    with meter or nullcontext():
        start = now = time.perf_counter()
        submitted = 1
        ticket = decoder.submit(batches[0])
        while now - start < seconds or submitted < LEAST_CALLS:
            following = decoder.submit(batches[submitted % len(batches)])
            decoder.collect(ticket)
            ticket, submitted, now = following, submitted + 1, time.perf_counter()
        decoder.collect(ticket)
        elapsed = time.perf_counter() - start
    rates.append((submitted / elapsed, TWO_IN_FLIGHT, meter.watts() if meter else None))

    rate, mode, watts = max(rates, key=lambda entry: entry[0])
    req_per_s = rate * len(batches[0])
    p50, p99 = np.percentile(np.array(latencies) * 1e3, [50, 99])
    return Measurement(
        latency_ms_p50=round(float(p50), 3),
        latency_ms_p99=round(float(p99), 3),
        calls=len(latencies),
        req_per_s=round(req_per_s, 1),
        req_per_s_mode=mode,
        joules_per_request=None if watts is None else round(watts / req_per_s, 4),
    )
