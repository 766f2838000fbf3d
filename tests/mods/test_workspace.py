"""Errors that decide about a scaling are those that the probe measures."""

from __future__ import annotations

import pytest
import torch

from loka_serve.mods.workspace import PIECE_ROWS, site_errors, worst
from loka_serve.probe.measure import measure_site

RECIPES = ("fp8_tensor", "fp8_row", "fp8_block", "int8_row")


@pytest.mark.parametrize("groups", [None, 3])
def test_pieces_change_no_error(groups: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    out = 2 * PIECE_ROWS + 70
    weight = torch.randn(*(() if groups is None else (groups,)), out, 192, generator=generator)
    weight[..., 300, :] *= 100  # another scale in one tile
    rows = torch.randn(20, 192, generator=generator)
    rows[:, 5] *= 50
    offsets = None if groups is None else torch.tensor([0, 12, 12, 20])
    amax = float(rows.abs().max())
    expected = measure_site(weight, rows, offsets, amax, RECIPES)
    found = site_errors(weight, rows, offsets, RECIPES)
    for recipe in RECIPES:
        error = expected[recipe]
        mere = error.output.floored_mere if groups is None else error.worst_group_floored_mere
        # The products are summed in another order.
        assert found[recipe] == pytest.approx(mere, rel=1e-4), recipe


def test_an_error_that_is_no_number_is_the_worst() -> None:
    rows = torch.ones(2, 128)
    rows[0, 0] = float("nan")
    assert site_errors(torch.ones(4, 128), rows, None, ("fp8_row",)) == {"fp8_row": float("inf")}
    assert worst({"a": {"fp8_row": 0.1, "fp8_block": 0.3}, "b": {"fp8_row": 0.2}}) == 0.3 and worst({}) == 0.0
