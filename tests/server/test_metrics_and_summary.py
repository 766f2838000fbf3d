"""Figures that operators read: padding, percentiles, the log's summary line."""

from __future__ import annotations

import pytest

from loka_serve.server.messages import DeviceMemory
from loka_serve.server.metrics import ServerMetrics, padding
from loka_serve.server.summary import LARGEST_SAMPLE, Window, percentile


@pytest.mark.parametrize(
    ("sizes", "share"),
    [([4, 4], 0.0), ([1, 3], 1 / 3), ([8], 0.0), ([0, 10], 0.5), ([0, 0], 0.0), ([], 0.0)],
)
def test_padding_is_the_share_of_a_batch_that_is_not_data(sizes: list[int], share: float) -> None:
    assert padding(sizes) == pytest.approx(share)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50, 99, 100)
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


def test_the_summary_line() -> None:
    window = Window()
    assert window.line(0) is None  # nothing happened
    for milliseconds in range(1, 101):
        window.request("ok", milliseconds / 1000)
    window.request("queue_full", 0.0001)
    window.batch(32)
    window.batch(16)
    line = window.line(5)
    assert line is not None
    assert line.endswith("p50 50.0 ms, p99 99.0 ms, mean batch 24.0, queue 5, ok 100, queue_full 1")
    window.reset()
    assert window.line(0) is None
    assert window.line(3) is not None  # something waits, that is worth a line


def test_a_long_window_keeps_a_bounded_sample_of_latencies() -> None:
    window = Window()
    for index in range(5 * LARGEST_SAMPLE):
        window.request("ok", index % 1000 / 1000)
    assert len(window.latencies) <= LARGEST_SAMPLE
    # Uniform over 0..999 ms; a sample of 10,000 or more has its median within 2 % of the middle.
    assert percentile(sorted(window.latencies), 50) == pytest.approx(0.5, abs=0.02)


def test_only_the_live_catalog_has_a_series() -> None:
    metrics = ServerMetrics()
    metrics.set_catalog("aaaa", 10)
    metrics.set_catalog("bbbb", 20)
    text = metrics.exposition().decode()
    assert 'loka_catalog_info{version="bbbb"} 1.0' in text
    assert "aaaa" not in text
    assert "loka_catalog_items 20.0" in text


def test_where_the_dispatch_table_is_from() -> None:
    metrics = ServerMetrics()
    metrics.set_dispatch("measured", "other_environment")
    metrics.set_dispatch("loaded", "")
    series = [line for line in metrics.exposition().decode().splitlines() if line.startswith("loka_dispatch_info")]
    assert series == ['loka_dispatch_info{reason_class="none",source="loaded"} 1.0']
    metrics.set_dispatch(None, None)
    assert "loka_dispatch_info{" not in metrics.exposition().decode()


def test_memory_of_the_gpu() -> None:
    metrics = ServerMetrics()
    assert "loka_gpu_memory_bytes{" not in metrics.exposition().decode()
    metrics.set_memory(DeviceMemory(reserved=2 << 30, used=3 << 30, total=140 << 30))
    shown = metrics.registry.get_sample_value
    assert [shown("loka_gpu_memory_bytes", {"kind": kind}) for kind in ("reserved", "used", "total")] == [
        2 << 30, 3 << 30, 140 << 30,
    ]  # fmt: skip


def test_no_created_series() -> None:
    assert "_created" not in ServerMetrics().exposition().decode()
