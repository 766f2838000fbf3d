"""The rules of `auto`, and of recipes asked for by name."""

from __future__ import annotations

import math

import pytest

from loka_serve.probe.choose import choose, fixed
from loka_serve.probe.errors import LogitsAgreement, OutputError
from loka_serve.probe.measure import RecipeError
from loka_serve.probe.sites import SiteKind


def error(mere: float, **more: object) -> RecipeError:
    return RecipeError(OutputError(mere / 2, 30.0, mere * 4, mere), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "first", "second"), [("linear", "fp8_row", "fp8_block"), ("grouped", "fp8_block", "fp8_row")]
)
def test_the_kinds_recipe_then_the_other_then_bf16(kind: SiteKind, first: str, second: str) -> None:
    assert choose(kind, {first: error(0.08), second: error(0.01)}).recipe == first
    fallback = choose(kind, {first: error(0.2), second: error(0.1)})
    assert fallback.recipe == second and f"{first}: floored MERE 0.200 is not below 0.2" in fallback.reason
    assert choose(kind, {first: error(0.3), second: error(0.25)}).recipe == "bf16"
    assert choose(kind, {first: error(math.nan), second: error(math.nan)}).recipe == "bf16"


def test_one_bad_expert_is_enough() -> None:
    bad = error(0.05, worst_group=3, worst_group_floored_mere=0.4)
    good = error(0.08, worst_group=1, worst_group_floored_mere=0.1)
    choice = choose("grouped", {"fp8_block": bad, "fp8_row": good})
    assert choice.recipe == "fp8_row" and "0.400 in group 3" in choice.reason


def test_routers_need_the_same_experts() -> None:
    assert choose("router", {"fp8_row": error(0.05, routing=0.9995)}).recipe == "fp8_row"
    choice = choose("router", {"fp8_row": error(0.05, routing=0.98)})
    assert choice.recipe == "bf16" and "keeps 98.00% of the selected experts" in choice.reason
    assert choose("router", {"fp8_row": error(0.3, routing=1.0)}).recipe == "bf16"


def test_heads_need_the_same_codes_and_distribution() -> None:
    def verdict(kl: float, overlap: float) -> str:
        return choose("head", {"fp8_row": error(0.05, logits=LogitsAgreement(kl, overlap))}).recipe

    assert verdict(5e-4, 0.995) == "fp8_row"
    assert verdict(2e-3, 0.995) == "bf16"
    assert verdict(5e-4, 0.98) == "bf16"
    assert verdict(math.nan, 1.0) == "bf16"


def test_a_site_without_rows_stays_bf16() -> None:
    assert choose("grouped", {}).recipe == "bf16"
    assert fixed("grouped", "fp8_tensor", {}).recipe == "bf16"
    assert fixed("grouped", "fp8_row", {}).recipe == "fp8_row"  # its scales are dynamic


def test_a_recipe_asked_for_spares_routers_and_heads() -> None:
    errors = {"fp8_row": error(5.0)}
    assert fixed("linear", "fp8_row", errors).recipe == "fp8_row"  # whatever its error
    assert fixed("router", "fp8_row", errors).recipe == "bf16"
    assert fixed("head", "fp8_row", errors).recipe == "bf16"
    assert fixed("head", "bf16", errors).recipe == "bf16"


def test_speeds_choose_the_fastest_within_bounds_and_bf16_without_a_gain() -> None:
    errors = {"fp8_row": error(0.08), "fp8_block": error(0.07)}
    faster = choose("linear", errors, {"fp8_row": 1.2, "fp8_block": 1.4})
    assert faster.recipe == "fp8_block" and faster.reason.endswith("1.40x the speed of BF16")
    assert choose("linear", {**errors, "fp8_block": error(0.3)}, {"fp8_row": 1.2, "fp8_block": 1.4}).recipe == "fp8_row"
    slow = choose("linear", errors, {"fp8_row": 1.05, "fp8_block": 0.9})
    assert slow.recipe == "bf16" and "fp8_row: 1.05x the speed of BF16 is not above 1.05x" in slow.reason
    only = choose("grouped", {"fp8_row": error(0.01), "fp8_block": error(0.3)}, {"fp8_block": 2.0})
    assert only.recipe == "bf16" and "fp8_row: no kernel was measured" in only.reason


def test_an_engine_s_candidates_take_the_place_of_the_usual_ones() -> None:
    errors = {"fp8_row": error(0.01), "fp8_block": error(0.01), "fp8_tensor": error(0.1)}
    assert choose("linear", errors, candidates=("fp8_tensor",)).recipe == "fp8_tensor"
    choice = choose("linear", errors | {"fp8_tensor": error(0.3)}, candidates=("fp8_tensor",))
    assert choice.recipe == "bf16" and "fp8_tensor: floored MERE 0.300 is not below 0.2" in choice.reason
    assert fixed("linear", "fp8_tensor", errors, ("fp8_tensor",)).recipe == "fp8_tensor"
    replaced = fixed("grouped", "fp8_tensor", errors, ("fp8_block",))
    assert (replaced.recipe, replaced.reason) == ("fp8_block", "the engine does not run fp8_tensor here")
    assert fixed("grouped", "bf16", errors, ("fp8_block",)).recipe == "bf16"
    assert fixed("router", "fp8_tensor", errors, ("fp8_row",)).recipe == "bf16"
