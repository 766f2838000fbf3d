"""The bounded row sample: bounded, uniform, made of real rows."""

from __future__ import annotations

import torch

from loka_serve.probe.sample import GroupRowSample, RowSample


def numbered_rows(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)[:, None] * torch.tensor([1.0, -1.0])


def test_keeps_everything_below_its_capacity() -> None:
    sample = RowSample(10, seed=0)
    sample.update(numbered_rows(4))
    sample.update(numbered_rows(6) + 4 * torch.tensor([1.0, -1.0]))
    assert sorted(sample.rows(2)[:, 0].tolist()) == list(range(10))


def test_stays_bounded_and_holds_rows_as_they_were() -> None:
    sample = RowSample(16, seed=0)
    for batch in numbered_rows(5000).split(37):
        sample.update(batch.double())
    rows = sample.rows(2)
    assert rows.shape == (16, 2) and rows.dtype == torch.float32
    assert torch.equal(rows[:, 0], -rows[:, 1]) and len(rows[:, 0].unique()) == 16


def test_every_row_is_equally_likely() -> None:
    counts = torch.zeros(100)
    for seed in range(2000):
        sample = RowSample(10, seed)
        for batch in numbered_rows(100).split(9):
            sample.update(batch)
        counts[sample.rows(2)[:, 0].long()] += 1
    # Each row is drawn Binomial(2000, .1) times: mean 200, standard deviation 13.4; 4.5 of them leave 100 rows a
    # chance of about .001 to stray. Early, middle and late rows alike.
    assert (counts - 200).abs().max() < 4.5 * 13.4
    assert abs(counts[:33].mean() - counts[67:].mean()) < 10


def test_the_same_stream_gives_the_same_sample() -> None:
    first, second = RowSample(8, seed=3), RowSample(8, seed=3)
    for batch in numbered_rows(300).split(50):
        first.update(batch)
        second.update(batch)
    assert torch.equal(first.rows(2), second.rows(2))


def test_does_not_alias_its_input() -> None:
    rows = numbered_rows(3)
    sample = RowSample(8, seed=0)
    sample.update(rows)
    rows.zero_()
    assert sorted(sample.rows(2)[:, 0].tolist()) == [0, 1, 2]


def test_groups_come_sorted_with_their_offsets() -> None:
    sample = GroupRowSample(3, capacity_per_group=4, seed=0)
    rows = torch.cat([numbered_rows(2) + 100, numbered_rows(20) + 500])
    sample.update(rows, torch.tensor([0, 2, 2, 22]))
    values, offsets = sample.rows(2)
    assert offsets.tolist() == [0, 2, 2, 6] and values.shape == (6, 2)
    assert (values[:2] < 200).all() and (values[2:, 0] >= 500).all()


def test_no_rows() -> None:
    assert RowSample(4, seed=0).rows(7).shape == (0, 7)
    values, offsets = GroupRowSample(2, 4, seed=0).rows(7)
    assert values.shape == (0, 7) and offsets.tolist() == [0, 0, 0]
