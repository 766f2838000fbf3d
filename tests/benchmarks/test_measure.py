"""The two ways to drive an engine, and power from samples."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from benchmarks.decoders import Decoder
from benchmarks.measure import LEAST_CALLS, TWO_IN_FLIGHT, measure, random_batches
from benchmarks.power import PowerMeter, energy_slope, mean_reading, open_power_meter
from benchmarks.yardstick import Shape
from loka_serve.engines.base import EngineLimits, check_batch
from loka_serve.models.config import PRESETS

from .fakes import FakeEngine

TINY = PRESETS["tiny"]


def test_batches_fit_an_engine_and_differ() -> None:
    batches = random_batches(TINY, batch=3, beam=16, context=20)
    for batch in batches:
        check_batch(batch, EngineLimits(3, 16, 20, 3), 0, TINY.codebook_sizes)
        assert [request.history.shape for request in batch.requests] == [(20, 3)] * 3
    assert not np.array_equal(batches[0].requests[0].history, batches[1].requests[0].history)


def open_fake(engine: FakeEngine) -> Decoder:
    return engine.open(TINY, None, [Shape(4, 16, 20)], torch.device("cpu"), {})


def test_measures_latency_and_throughput() -> None:
    engine = FakeEngine(seconds=0.02)
    watts = PowerMeter(lambda: 300.0, counts_energy=False)
    measured = measure(open_fake(engine), random_batches(TINY, 4, 16, 20), seconds=0.05, meter=watts)
    assert 19.0 < measured.latency_ms_p50 <= measured.latency_ms_p99
    assert measured.calls >= LEAST_CALLS
    assert engine.most_in_flight == 2 and engine.in_flight == 0
    assert 0 < measured.req_per_s <= 4 / 0.02 * 1.01
    assert measured.joules_per_request == pytest.approx(300 / measured.req_per_s, rel=0.01)


def test_two_in_flight_hide_the_host_time() -> None:
    decoder = open_fake(FakeEngine(seconds=0.02, host_seconds=0.02))
    measured = measure(decoder, random_batches(TINY, 1, 1, 1), seconds=0.2)
    assert measured.req_per_s_mode == TWO_IN_FLIGHT
    assert measured.joules_per_request is None
    assert measured.req_per_s > 1.1e3 / measured.latency_ms_p50


def test_power_from_an_energy_counter() -> None:
    # 100 J between the ticks at 0.1 s and 0.3 s; what lies before and after them does not count.
    samples = [(0.0, 5.0), (0.1, 40.0), (0.2, 40.0), (0.25, 90.0), (0.3, 140.0), (0.35, 140.0)]
    assert energy_slope(samples) == pytest.approx(500.0)
    assert energy_slope(samples[:2]) is None
    assert energy_slope([]) is None


def test_power_from_momentary_readings() -> None:
    assert mean_reading([(0.0, 100.0), (0.1, 300.0), (0.2, 500.0)]) == 400.0
    assert mean_reading([]) is None


def test_meter_runs_once_for_each_measurement() -> None:
    joules = itertools.count(0.0, 3.0)
    meter = PowerMeter(lambda: next(joules), counts_energy=True)
    for _ in range(2):
        with meter:
            time.sleep(0.1)
        watts = meter.watts()
        assert watts is not None and 50 < watts < 400


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a meter")
def test_no_gpu_no_meter() -> None:
    assert open_power_meter() is None
