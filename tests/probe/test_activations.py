"""Mean and covariance of activations against float64 over the whole tensor; memory; draws."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loka_serve.probe.activations import GaussianEstimate, GaussianRows
from loka_serve.probe.block_diagonal import dense

MAX_SITE_BYTES = 200e6


def correlated(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Neighbours correlated, one feature a hundred times the others, means far from zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator)
    values[:, 1:] += 0.7 * values[:, :-1]
    values[:, width // 2] *= 100
    return values + torch.linspace(-5, 5, width)


def exact(values: torch.Tensor) -> torch.Tensor:
    return torch.cov(values.double().T, correction=0)


def estimate_of(values: torch.Tensor, width: int | None = None) -> GaussianEstimate:
    estimate = GaussianEstimate(values.shape[1], width=width)
    for batch in values.split(173):
        estimate.update(batch)
    return estimate


def assert_close(covariance: torch.Tensor, expected: torch.Tensor) -> None:
    # float32 products of deviations, float64 sums: the error of an entry is relative to its two deviations.
    deviation = expected.diagonal().sqrt()
    torch.testing.assert_close(
        covariance / deviation / deviation[:, None], expected / deviation / deviation[:, None], rtol=0, atol=1e-6
    )


def test_batches_give_the_mean_and_covariance_of_the_stream() -> None:
    values = correlated(2000, 40)
    estimate = estimate_of(values)
    torch.testing.assert_close(estimate.mean[0], values.double().mean(0), rtol=1e-12, atol=1e-12)
    assert_close(estimate.covariance(), exact(values))
    torch.testing.assert_close(estimate.squares[0] / 2000, exact(values).diagonal(), rtol=1e-10, atol=0)


def test_a_large_mean_costs_no_precision() -> None:
    values = correlated(500, 8) + 4096
    # E[xx^T] - mu mu^T in float32 would be off by whole units: the values themselves have a step of 0.0005.
    assert_close(estimate_of(values).covariance(), exact(values))


def test_blocks_keep_what_is_inside_them() -> None:
    values = correlated(1000, 20)
    covariance, expected = estimate_of(values, width=8).covariance(), exact(values)
    inside = torch.block_diag(torch.ones(8, 8), torch.ones(8, 8), torch.ones(4, 4)).bool()
    assert (covariance[~inside] == 0).all()
    assert_close(covariance, expected * inside)


def test_merging_is_associative_up_to_rounding() -> None:
    values = correlated(1500, 30)
    parts = values.split([200, 300, 1000])

    def merged(*estimates: GaussianEstimate) -> GaussianEstimate:
        whole = GaussianEstimate(30)
        for estimate in estimates:
            whole.merge(estimate)
        return whole

    first, second, third = (estimate_of(part) for part in parts)
    left, right = merged(merged(first, second), third), merged(third, merged(second, first))
    for ours, theirs in zip(left.state().values(), right.state().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-9)
    assert_close(left.covariance(), exact(values))


def test_groups_share_the_correlations_within_them() -> None:
    values, groups = correlated(600, 12), torch.arange(600) % 3
    values[groups == 1] += 50.0  # a mean of its own is no covariance
    estimate = GaussianEstimate(12, groups=4)
    for start in range(0, 600, 128):
        estimate.update(values[start : start + 128], groups[start : start + 128])
    assert estimate.counts.tolist() == [200, 200, 200, 0]
    within = sum(exact(values[groups == group]) for group in range(3)) / 3
    assert_close(estimate.covariance(), within)
    torch.testing.assert_close(estimate.mean[1], values[groups == 1].double().mean(0), rtol=1e-12, atol=1e-12)


def test_rows_that_are_not_finite_are_left_out() -> None:
    values = correlated(100, 6)
    broken = values.clone()
    broken[3, 2], broken[50, 0] = float("nan"), float("inf")
    kept = torch.ones(100, dtype=torch.bool)
    kept[[3, 50]] = False
    estimate = estimate_of(broken)
    assert estimate.counts.item() == 98
    assert_close(estimate.covariance(), exact(values[kept]))


class _Allocated(TorchDispatchMode):
    """Bytes of all storages that operations make inside the block, each counted once, none ever freed."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._keep: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._keep:
                self._keep[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
                self.total += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("groups", [1, 53])
def test_a_site_of_3584_features_stays_below_its_memory(groups: int) -> None:
    """State and every temporary of an update, even if none of them were ever freed, one piece of rows at a time."""
    estimate = GaussianEstimate(3584, groups)
    state = sum(tensor.nbytes for tensor in estimate.state().values())
    assert state < (4.5e6 if groups == 1 else 8e6)
    rows = torch.randn(36, 3584)  # as many as an update takes at once
    with _Allocated() as allocated:
        estimate.update(rows, None if groups == 1 else torch.arange(36) % groups)
    assert allocated.total > rows.nbytes  # it has counted
    assert state + allocated.total < MAX_SITE_BYTES


def test_draws_have_the_estimated_mean_and_covariance() -> None:
    values = correlated(4000, 16)
    rows = GaussianRows(estimate_of(values)).draw(40_000, 0, torch.Generator().manual_seed(1)).double()
    expected = exact(values)
    deviation = expected.diagonal().sqrt()
    # Five standard errors of a mean, and of a correlation, over 40,000 draws: 5 / 200.
    assert ((rows.mean(0) - values.double().mean(0)).abs() < 0.025 * deviation).all()
    assert ((exact(rows) - expected).abs() / deviation / deviation[:, None] < 0.025 * 2**0.5).all()


def test_few_rows_and_constant_features_can_be_drawn() -> None:
    values = correlated(5, 16)
    values[:, 3] = 7.0
    rows = GaussianRows(estimate_of(values)).draw(10, 0, torch.Generator().manual_seed(0))
    assert rows.isfinite().all() and (rows[:, 3] == 7.0).all()


def test_dense_is_the_inverse_of_splitting() -> None:
    blocks = torch.arange(8.0).view(2, 2, 2)
    assert dense(blocks, 3).tolist() == [[0, 1, 0], [2, 3, 0], [0, 0, 4]]


def test_estimates_of_other_shapes_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"estimate of shape \[1, 5\]: expected \[1, 4\]"):
        GaussianEstimate(4).merge(GaussianEstimate(5))
