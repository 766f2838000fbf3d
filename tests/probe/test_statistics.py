"""Streaming statistics against the same figures computed from the whole tensor."""

from __future__ import annotations

import math

import pytest
import torch

from loka_serve.probe.statistics import (
    BINS_PER_OCTAVE,
    GroupStatistics,
    MagnitudeHistogram,
    TensorStatistics,
)


def stream(rows: int = 3000, width: int = 40, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * 3 + 1


def check(statistics: TensorStatistics, values: torch.Tensor) -> None:
    summary, values = statistics.summary(), values.double()
    assert summary.rows == len(values)
    assert summary.absmax == values.abs().max().item()
    # float64 sums in another order.
    assert summary.mean == pytest.approx(values.mean().item(), rel=1e-9)
    assert summary.variance == pytest.approx(values.var(correction=0).item(), rel=1e-6)
    # A bin is up to 1/16 wide; within it the density is nearly even, so interpolation does far better.
    assert summary.p99 == pytest.approx(values.abs().flatten().quantile(0.99).item(), rel=0.01)


def test_batches_give_what_the_whole_stream_does() -> None:
    values = stream()
    statistics = TensorStatistics()
    for batch in values.split([1, 999, 7, 1993]):
        statistics.update(batch)
    check(statistics, values)


def test_parts_merge() -> None:
    values = stream()
    parts = [TensorStatistics() for _ in range(3)]
    for part, batch in zip(parts, values.split(1000), strict=True):
        part.update(batch)
    for part in parts[1:]:
        parts[0].merge(part)
    check(parts[0], values)


def test_a_large_mean_costs_no_precision() -> None:
    values = torch.tensor([[4097.0], [4098.0], [4099.0]])
    statistics = TensorStatistics()
    for row in values:
        statistics.update(row[None])
    # E[x^2] - E[x]^2 in float32 would be off by whole units here.
    assert statistics.summary().variance == pytest.approx(2 / 3, rel=1e-12)


def test_bfloat16_input() -> None:
    values = stream().bfloat16()
    statistics = TensorStatistics()
    statistics.update(values)
    check(statistics, values)


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    statistics = TensorStatistics()
    statistics.update(torch.tensor([[1.0, math.nan, -2.0], [math.inf, 1.0, -math.inf]]))
    summary = statistics.summary()
    assert statistics.non_finite == 3 and summary.rows == 2
    assert summary.absmax == 2.0 and summary.mean == pytest.approx(0.0)


def test_no_values() -> None:
    statistics = TensorStatistics()
    statistics.update(torch.empty(0, 5))
    summary = statistics.summary()
    assert summary.rows == 0 and summary.absmax == 0.0 and math.isnan(summary.p99) and math.isnan(summary.variance)


def test_constant_and_zero_streams() -> None:
    for value in (0.0, 0.3, -5.0):
        statistics = TensorStatistics()
        statistics.update(torch.full((10, 10), value))
        summary = statistics.summary()
        assert summary.absmax == pytest.approx(abs(value)) and summary.variance == pytest.approx(0.0, abs=1e-12)
        assert summary.p99 <= summary.absmax and summary.p99 == pytest.approx(abs(value), rel=1 / BINS_PER_OCTAVE)


def test_quantiles_of_a_known_distribution() -> None:
    histogram = MagnitudeHistogram()
    histogram.update(torch.arange(1, 100_001) / 1000.0)  # even from 0 to 100
    for q in (0.01, 0.5, 0.9, 0.99):
        # Even density within each bin makes interpolation exact up to the grid of .001.
        assert histogram.quantile(q) == pytest.approx(100 * q, abs=0.01)
    assert 100 <= histogram.quantile(1.0) <= 100 * (1 + 1 / BINS_PER_OCTAVE)


def test_magnitudes_beyond_the_bins_are_not_lost() -> None:
    histogram = MagnitudeHistogram()
    histogram.update(torch.tensor([0.0, 1e-30, 3e38, 1.0]))
    assert int(histogram.counts.sum()) == 4
    assert histogram.quantile(0.25) < 1e-11 and histogram.quantile(1.0) == pytest.approx(2.0**24)


def test_groups() -> None:
    values = stream(100, 8)
    offsets = torch.tensor([0, 30, 30, 100])
    groups = GroupStatistics(3)
    groups.update(values[:50], torch.tensor([0, 30, 30, 50]))
    groups.update(values[50:], torch.tensor([0, 0, 0, 50]))
    assert [group.rows for group in groups.groups] == [30, 0, 70]
    assert groups.groups[2].absmax == values[offsets[2] :].abs().max().item()
    total = groups.total().summary()
    assert total.rows == 100 and total.mean == pytest.approx(values.double().mean().item(), rel=1e-9)
    assert [group.rows for group in groups.groups] == [30, 0, 70]  # total() changes nothing


def test_octaves_count_magnitudes_by_power_of_two() -> None:
    statistics = TensorStatistics()
    statistics.update(torch.tensor([[0.5, -0.75, 1.0, 3.9, -4.0, 7.99]]))
    assert statistics.summary().octaves == {-1: 2, 0: 1, 1: 1, 2: 2}
