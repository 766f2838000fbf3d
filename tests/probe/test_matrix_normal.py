"""The flip-flop estimate: recovers what it was drawn from, converges, survives degenerate weights."""

from __future__ import annotations

import pytest
import torch

from loka_serve.probe.block_diagonal import dense, regularised, shrinkage
from loka_serve.probe.matrix_normal import estimate_matrix_normal


def autoregressive(size: int, correlation: float) -> torch.Tensor:
    places = torch.arange(size)
    return correlation ** (places[:, None] - places).abs().double()


def draw(groups: int, rows: torch.Tensor, columns: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(groups, len(rows), len(columns), generator=generator, dtype=torch.float64)
    return (torch.linalg.cholesky(rows) @ noise @ torch.linalg.cholesky(columns).T).float()


def covariance(factor: torch.Tensor, size: int) -> torch.Tensor:
    return dense(factor @ factor.mT, size)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_both_covariances_are_recovered() -> None:
    rows, columns = autoregressive(16, 0.5), autoregressive(24, 0.8)
    model = estimate_matrix_normal(draw(8, rows, columns))
    assert model.converged and 1 < model.iterations < 50
    # The fitted mean of each column takes the rows' common part out: what is left of U is C U C, C = I - 11^T / 16.
    center = torch.eye(16).double() - 1 / 16
    left = center @ rows @ center
    # 8 matrices are 192 and 128 whitened samples of 16 and 24 features: some 20 % of sampling error, and shrinkage.
    assert distance(covariance(model.row_factor, 16), left / left.diagonal().mean()) < 0.25
    assert distance(covariance(model.column_factor, 24), columns) < 0.3
    # Far better than no structure.
    assert distance(torch.eye(24).double(), columns) > 0.6


def test_a_weight_without_structure_gives_nearly_identities() -> None:
    model = estimate_matrix_normal(torch.randn(128, 96, generator=torch.Generator().manual_seed(0)) * 0.3)
    assert model.converged and model.scale.item() == pytest.approx(0.3, rel=0.02)
    off = covariance(model.column_factor, 96).fill_diagonal_(0)
    assert off.abs().max() < 0.05


def test_covariances_are_symmetric_and_normalised() -> None:
    model = estimate_matrix_normal(draw(1, autoregressive(20, 0.6), autoregressive(30, 0.4)))
    for factor, size in ((model.row_factor, 20), (model.column_factor, 30)):
        found = covariance(factor, size)
        torch.testing.assert_close(found, found.T, rtol=0, atol=1e-15)  # L L^T sums in another order
        assert (torch.linalg.eigvalsh(found) > 0).all()
        assert found.diagonal().mean().item() == pytest.approx(1.0, rel=1e-9)


def test_a_large_channel_keeps_its_size_and_the_others_theirs() -> None:
    scale = torch.ones(32).double()
    scale[5] = 1000.0
    model = estimate_matrix_normal(draw(1, torch.eye(64).double(), torch.diag(scale.square())))
    deviation = covariance(model.column_factor, 32).diagonal().sqrt()
    ratio = deviation[5] / deviation[torch.arange(32) != 5].mean()
    assert ratio.item() == pytest.approx(1000.0, rel=0.3)  # 64 samples: 3 standard errors of a deviation


def test_groups_have_their_own_mean_and_scale() -> None:
    weight = (
        torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 100.0, 0.0])[:, None, None]
        + torch.tensor([0.0, 5.0, 2.0])[:, None, None]
    )
    model = estimate_matrix_normal(weight)
    assert model.scale[1].item() == pytest.approx(100.0, rel=0.05) and model.scale[2].item() == 0.0
    drawn = model.draw(1, 0, torch.Generator().manual_seed(1))
    assert drawn.std().item() == pytest.approx(100.0, rel=0.1)
    assert (model.draw(2, 0, torch.Generator().manual_seed(1)) == 2.0).all()  # constant weights stay constant


@pytest.mark.parametrize("shape", [(5, 7), (300, 130), (1, 4), (8, 700)])
def test_any_shape_can_be_drawn(shape: tuple[int, int]) -> None:
    model = estimate_matrix_normal(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16())
    drawn = model.draw(0, 0, torch.Generator().manual_seed(0))
    assert drawn.shape == (min(shape[0], 128), shape[1]) and drawn.isfinite().all()


def test_a_dead_channel_and_a_zero_weight_are_no_obstacle() -> None:
    weight = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    weight[:, 4] = 0.0
    drawn = estimate_matrix_normal(weight).draw(0, 0, torch.Generator().manual_seed(0))
    assert drawn[:, 4].abs().max() < 1e-4 and drawn.isfinite().all()
    nothing = estimate_matrix_normal(torch.zeros(6, 6))
    assert nothing.converged and (nothing.draw(0, 0, torch.Generator().manual_seed(0)) == 0).all()


def test_the_shrinkage_of_closed_form_cases() -> None:
    assert shrinkage(torch.eye(10).double()[None], 1000) == 1.0  # nothing to keep
    strong = torch.full((10, 10), 0.9, dtype=torch.float64).fill_diagonal_(1.0)[None]
    # Equation 23 of the paper by hand: tr(S^2) = 82.9, tr(S)^2 = 100.
    expected = (0.8 * 82.9 + 100) / ((1000 + 0.8) * (82.9 - 10))
    assert shrinkage(strong, 1000) == pytest.approx(expected, rel=1e-12)
    assert shrinkage(strong, 0) == 1.0


def test_regularisation_is_positive_definite_whatever_the_rank() -> None:
    values = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)).double()
    blocks = (values.T @ values / 3)[None] + torch.triu(torch.full((12, 12), 1e-9).double(), 1)  # not quite symmetric
    correlation, deviation = regularised(blocks, 3)
    assert torch.equal(correlation, correlation.mT) and (torch.linalg.eigvalsh(correlation) > 0).all()
    torch.testing.assert_close(deviation, values.square().mean(0).sqrt(), rtol=1e-12, atol=0)
