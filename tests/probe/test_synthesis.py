"""Errors on synthetic pairs: the known figures of Gaussian sites, intervals, and what limits the pairs."""

from __future__ import annotations

import math

import pytest
import torch

from loka_serve.probe.activations import GaussianEstimate
from loka_serve.probe.measure import measure_site
from loka_serve.probe.synthesis import estimate, student_quantile, synthesize_errors
from loka_serve.quantization.recipes import RECIPES


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def estimate_of(rows: torch.Tensor, groups: int = 1) -> GaussianEstimate:
    found = GaussianEstimate(rows.shape[1], groups)
    found.update(rows, None if groups == 1 else torch.arange(len(rows)) % groups)
    return found


def test_gaussian_sites_have_their_known_errors() -> None:
    rows, weight = gaussian(2000, 256), gaussian(128, 256, seed=1)
    found = synthesize_errors(weight, estimate_of(rows), rows.abs().max().item())
    assert found is not None and found.pairs == 100 and not found.pairs_reason and found.flip_flop_converged
    assert (found.rows, found.outputs) == (32, 128) and list(found.errors) == list(RECIPES)
    fp8, bf16 = found.errors["fp8_row"], found.errors["bf16"]
    # The figures of DESIGN's section on precision: 0.079 and 0.037 for FP8, 0.005 for BF16.
    assert fp8["floored_mere"].mean == pytest.approx(0.079, rel=0.03)
    assert fp8["relative_frobenius"].mean == pytest.approx(0.037, rel=0.03)
    assert bf16["floored_mere"].mean == pytest.approx(0.005, rel=0.03)
    assert fp8["sqnr_db"].mean == pytest.approx(-20 * math.log10(0.037), abs=0.3)
    for figures in found.errors.values():
        steady = figures["floored_mere"]
        assert steady.low < steady.mean < steady.high and steady.high - steady.low < 0.03 * steady.mean


def test_synthetic_errors_are_those_of_real_rows_where_these_are_gaussian() -> None:
    rows, weight = gaussian(4000, 128), gaussian(128, 128, seed=1)
    rows[:, 7] *= 50  # an outlier channel: what int8 cannot take
    weight[:, 7] /= 50
    amax = rows.abs().max().item()
    found = synthesize_errors(weight, estimate_of(rows), amax)
    real = measure_site(weight, rows[:1000], None, amax, list(RECIPES))
    assert found is not None
    for recipe, error in real.items():
        figure = found.errors[recipe]["relative_frobenius"].mean
        # One weight against many: the outlier channel's share of the output varies by some percent.
        assert figure == pytest.approx(error.output.relative_frobenius, rel=0.12), recipe
    assert found.errors["int8_row"]["relative_frobenius"].low > found.errors["fp8_row"]["relative_frobenius"].high


def test_every_group_that_saw_rows_is_drawn() -> None:
    weight = gaussian(3, 32, 64)
    weight[1] *= 1e6
    inputs = GaussianEstimate(64, groups=3)
    inputs.update(gaussian(100, 64), torch.arange(100) % 2)  # nothing reaches group 2
    found = synthesize_errors(weight, inputs, 4.0, pairs=10)
    assert found is not None and found.pairs == 10
    # A scale belongs to a channel or tile of one expert: huge weights of another change nothing.
    assert found.errors["fp8_row"]["floored_mere"].mean == pytest.approx(0.079, rel=0.1)


def test_nothing_to_draw_from() -> None:
    assert synthesize_errors(gaussian(8, 8), GaussianEstimate(8), 1.0) is None
    assert synthesize_errors(gaussian(8, 8), estimate_of(gaussian(20, 8)), 1.0, pairs=0) is None


def test_a_wide_site_on_a_cpu_takes_fewer_pairs_and_says_so() -> None:
    found = synthesize_errors(gaussian(128, 4096), estimate_of(gaussian(40, 4096)), 5.0, recipes=["bf16"])
    assert found is not None and found.pairs == 8
    assert found.pairs_reason == "a pair has 524288 weights, and a site draws about 4194304 in all on cpu"


def test_the_same_seed_gives_the_same_figures() -> None:
    weight, inputs = gaussian(16, 32), estimate_of(gaussian(50, 32))
    first, second = (synthesize_errors(weight, inputs, 4.0, pairs=5, seed=3) for _ in range(2))
    assert first == second and first != synthesize_errors(weight, inputs, 4.0, pairs=5, seed=4)


@pytest.mark.parametrize(
    ("degrees", "quantile", "tolerance"),
    [(1, 12.7062, 1e-4), (2, 4.3027, 1e-4), (3, 3.1824, 5e-3), (7, 2.3646, 1e-3), (99, 1.9842, 1e-3)],
)
def test_student_quantiles(degrees: int, quantile: float, tolerance: float) -> None:
    """Tabulated values."""
    assert student_quantile(degrees) == pytest.approx(quantile, rel=tolerance)


def test_an_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])  # standard error 1 / sqrt(3), t = 4.3027
    assert found.mean == 2.0 and found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert math.isnan(estimate([1.0]).low)
