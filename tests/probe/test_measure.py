"""Measuring recipes at one site: what hurts shows, and only where it should."""

from __future__ import annotations

import pytest
import torch

from loka_serve.probe.choose import choose
from loka_serve.probe.measure import Routing, measure_site
from loka_serve.quantization.recipes import RECIPES

ALL = list(RECIPES)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_gaussian_site() -> None:
    rows = gaussian(128, 256)
    errors = measure_site(gaussian(200, 256, seed=1), rows, None, rows.abs().max().item(), ALL)
    assert list(errors) == ALL
    # 128 rows give the figures of tests/quantization/test_recipes.py within a few percent.
    assert errors["fp8_row"].output.floored_mere == pytest.approx(0.079, rel=0.05)
    assert errors["bf16"].output.floored_mere == pytest.approx(0.005, rel=0.05)
    assert errors["fp8_row"].worst_group is None and errors["fp8_row"].logits is None


def test_an_outlier_channel_ruins_int8_and_spares_fp8_block() -> None:
    """One input channel 1000 times the others: a scale a row leaves INT8 one step for all else; FP8 has exponents."""
    rows, weight = gaussian(64, 256), gaussian(64, 256, seed=1)
    rows[:, 7] *= 1000
    weight[:, 7] /= 1000  # all channels matter alike
    errors = measure_site(weight, rows, None, rows.abs().max().item(), ALL)
    assert errors["int8_row"].output.floored_mere > 0.5
    assert errors["fp8_block"].output.floored_mere < errors["fp8_row"].output.floored_mere
    assert choose("linear", errors).recipe in ("fp8_row", "fp8_block")


def test_a_static_scale_far_above_the_rows_is_measured_as_bad() -> None:
    rows, weight = gaussian(64, 128), gaussian(64, 128, seed=1)
    errors = measure_site(weight, rows, None, 2e5, ["fp8_tensor", "fp8_row"])
    assert errors["fp8_tensor"].output.floored_mere > 0.5  # all inputs fall below the smallest code
    assert errors["fp8_row"].output.floored_mere < 0.1


def test_the_worst_expert_is_named() -> None:
    rows, weight = gaussian(30, 128), gaussian(3, 16, 128, seed=1)
    offsets = torch.tensor([0, 10, 10, 30])
    # Within one channel of expert 2, weights 2**20 apart: the small ones vanish, and here they decide the output.
    weight[2, :, 0] = 2.0**20
    rows[10:, 0] = 0.0
    errors = measure_site(weight, rows, offsets, rows.abs().max().item(), ["fp8_block", "bf16"])
    assert errors["fp8_block"].worst_group == 2
    assert errors["fp8_block"].worst_group_floored_mere is not None
    assert errors["fp8_block"].worst_group_floored_mere > 0.5
    assert errors["bf16"].output.floored_mere < 0.01
    assert choose("grouped", errors | {"fp8_row": errors["fp8_block"]}).recipe == "bf16"


def test_a_peaked_head_is_cleared_and_a_flat_one_is_not() -> None:
    """Random hidden states give near-random rankings that FP8 disturbs; well separated ones survive it."""
    rows = gaussian(64, 128)
    flat = measure_site(gaussian(100, 128, seed=1), rows, None, 5.0, ["fp8_row"], is_head=True)
    assert flat["fp8_row"].logits is not None and choose("head", flat).recipe == "bf16"
    # Logits in steps of 60 on an axis of their own: no rounding error swaps two, and the first has all probability.
    steps = torch.zeros(100, 128)
    steps[:, 0] = torch.arange(100.0)
    rows = torch.zeros(64, 128)
    rows[:, 0] = 60.0
    clear = measure_site(steps[[0, 30, 60, 99]], rows, None, 60.0, ["fp8_row"], is_head=True)
    assert choose("head", clear).recipe == "fp8_row"


def test_a_routers_experts() -> None:
    rows, weight = gaussian(128, 64), gaussian(8, 64, seed=1)
    near_ties = measure_site(weight, rows, None, 5.0, ["fp8_row"], routing=Routing(torch.zeros(8), 2))
    agreement = near_ties["fp8_row"].routing
    assert agreement is not None and 0.8 < agreement < 0.999 and choose("router", near_ties).recipe == "bf16"
    forced = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0])  # selection is settled by the bias alone
    settled = measure_site(weight, rows, None, 5.0, ["fp8_row"], routing=Routing(forced, 2))
    assert settled["fp8_row"].routing == 1.0 and choose("router", settled).recipe == "fp8_row"


def test_bfloat16_weights() -> None:
    rows, weight = gaussian(32, 64), gaussian(3, 8, 64, seed=1).bfloat16()
    offsets = torch.tensor([0, 8, 16, 32])
    errors = measure_site(weight, rows, offsets, 5.0, ["bf16"])
    assert 0 < errors["bf16"].output.relative_frobenius < 0.0025  # only the inputs are rounded
