"""Moments by group against float64 formulas over the whole tensor, and merging in any order."""

from __future__ import annotations

import pytest
import torch

from loka_serve.probe.statistics import GroupStatistics, TensorStatistics
from loka_serve.probe.statistics_table import StatisticsTable, combine_moments, group_of_rows


def stream(rows: int = 900, width: int = 24, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).exp() * 3 + 1  # skewed: odd moments count


def expected_moments(values: torch.Tensor) -> torch.Tensor:
    values = values.double().flatten()
    deviations = values - values.mean()
    powers = [deviations.pow(power).sum() for power in (2, 3, 4)]
    return torch.stack([torch.tensor(float(values.numel()), dtype=torch.float64), values.mean(), *powers])


def table_of(*batches: torch.Tensor) -> StatisticsTable:
    table = StatisticsTable(1)
    for batch in batches:
        table.update(batch)
    return table


def test_moments_of_batches_are_those_of_the_stream() -> None:
    values = stream()
    table = table_of(*values.split([1, 300, 599]))
    # float64 sums in another order.
    torch.testing.assert_close(table.moments[0], expected_moments(values), rtol=1e-9, atol=0)


def test_kurtosis_of_known_distributions() -> None:
    for values, kurtosis, tolerance in (
        (torch.linspace(-1, 1, 100_001)[:, None], 1.8, 1e-4),  # uniform; the grid's own error is 1e-5
        (torch.tensor([[-1.0], [1.0]]), 1.0, 1e-12),
        (torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0)), 3.0, 0.05),  # five standard errors
    ):
        statistics = TensorStatistics()
        statistics.update(values)
        assert statistics.summary().kurtosis == pytest.approx(kurtosis, abs=tolerance)


def test_merging_is_associative_and_commutative_up_to_rounding() -> None:
    parts = [table_of(batch) for batch in stream().split([100, 500, 300])]

    def merged(*order: int, nested: bool) -> StatisticsTable:
        first, second, third = (table_of() for _ in order)
        for table, index in zip((first, second, third), order, strict=True):
            table.merge(parts[index])
        if nested:
            second.merge(third)
            first.merge(second)
        else:
            first.merge(second)
            first.merge(third)
        return first

    reference = merged(0, 1, 2, nested=False)
    torch.testing.assert_close(reference.moments[0], expected_moments(stream()), rtol=1e-9, atol=0)
    for order, nested in (((0, 1, 2), True), ((2, 0, 1), False), ((1, 2, 0), True)):
        other = merged(*order, nested=nested)
        torch.testing.assert_close(other.moments, reference.moments, rtol=1e-9, atol=0)
        assert torch.equal(other.counts, reference.counts) and torch.equal(other.absmax, reference.absmax)


def test_an_empty_part_changes_nothing() -> None:
    table = table_of(stream())
    before = table.moments.clone()
    table.merge(StatisticsTable(1))
    torch.testing.assert_close(table.moments, before, rtol=1e-15, atol=0)
    torch.testing.assert_close(combine_moments(torch.zeros(5).double(), before[0]), before[0], rtol=1e-15, atol=0)


def test_groups_are_those_of_their_rows() -> None:
    values, offsets = stream(), torch.tensor([0, 200, 200, 900])
    groups = GroupStatistics(3)
    groups.update(values, offsets)
    for group, rows in enumerate((values[:200], values[:0], values[200:])):
        one = groups.groups[group]
        assert one.rows == len(rows)
        if len(rows):
            torch.testing.assert_close(one.table.moments[0], expected_moments(rows), rtol=1e-9, atol=0)
            assert one.absmax == rows.abs().max().item() and int(one.histogram.counts.sum()) == rows.numel()
    torch.testing.assert_close(groups.total().table.moments[0], expected_moments(values), rtol=1e-9, atol=0)


def test_non_finite_values_of_a_group_are_its_own() -> None:
    values = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    groups = GroupStatistics(2)
    groups.update(values, torch.tensor([0, 1, 2]))
    assert [group.non_finite for group in groups.groups] == [1, 0]
    assert groups.groups[0].summary().mean == 1.0 and groups.groups[1].summary().mean == 2.5


def test_group_of_rows() -> None:
    assert group_of_rows(torch.tensor([0, 2, 2, 5]), 5).tolist() == [0, 0, 2, 2, 2]


def test_tables_of_other_groups_do_not_merge() -> None:
    with pytest.raises(ValueError, match="statistics of 2 groups: expected 1"):
        StatisticsTable(1).merge(StatisticsTable(2))
