"""The rule of dispatch on scripted candidates."""

from __future__ import annotations

import math

import pytest

from loka_serve.kernels.dispatch_rule import Candidate, decide, objection


def candidate(recipe: str, us: float, mere: float | None = 0.08, name: str = "torch") -> Candidate:
    return Candidate(name, f"library of {name}", recipe, us, mere)


BF16 = candidate("bf16", 10.0, 0.005)
SLOW_BF16 = candidate("bf16", 12.0, 0.005, "deep_gemm")


def test_the_fastest_feasible_one_runs() -> None:
    row, block = candidate("fp8_row", 6.0), candidate("fp8_block", 7.0, name="triton_64x64")
    decision = decide([SLOW_BF16, block, BF16, row])
    assert decision.choice is row and decision.runner_up is block and decision.bf16_us == 10.0
    assert decision.reason == "1.67x the speed of BF16, floored MERE 0.080"


@pytest.mark.parametrize("mere", [0.2, 0.31, math.nan, math.inf])
def test_an_error_of_a_fifth_or_more_is_never_chosen(mere: float) -> None:
    fast, safe = candidate("fp8_row", 2.0, mere), candidate("fp8_block", 9.0)
    decision = decide([fast, safe, BF16])
    assert decision.choice is safe and decision.runner_up is BF16
    alone = decide([fast, BF16])
    assert alone.choice is BF16 and alone.runner_up is None
    assert alone.reason == f"fp8_row by torch: its floored MERE {mere:.3f} is not below 0.2"


@pytest.mark.parametrize(("us", "chosen"), [(10.0 / 1.05, False), (9.6, False), (9.5, True), (11.0, False)])
def test_a_gain_must_be_above_a_twentieth(us: float, chosen: bool) -> None:
    fp8 = candidate("fp8_row", us)
    assert (decide([BF16, fp8]).choice is fp8) == chosen
    assert (objection(fp8, 10.0) == "") == chosen


def test_the_gain_is_over_the_fastest_bf16() -> None:
    fp8 = candidate("fp8_row", 9.8)  # 1.22x the slower one
    decision = decide([SLOW_BF16, fp8, BF16])
    assert decision.choice is BF16 and decision.runner_up is SLOW_BF16
    assert decision.reason == "fp8_row by torch: 1.02x the speed of BF16 is not above 1.05x"


def test_recipes_that_are_not_served_are_for_comparison_alone() -> None:
    tensor, row = candidate("fp8_tensor", 4.0), candidate("fp8_row", 6.0)
    assert decide([BF16, tensor, row]).choice is row
    assert decide([BF16, tensor, row], ("fp8_tensor",)).choice is tensor
    assert decide([BF16, tensor]).reason == "nothing else computes it"


def test_what_was_not_measured_is_no_candidate() -> None:
    assert decide([BF16, candidate("fp8_row", 6.0, None)]).choice is BF16
    row = candidate("fp8_row", 6.0)
    without = decide([row])
    assert without.choice is row and without.bf16_us is None and without.reason.startswith("no BF16 ran")
    with pytest.raises(ValueError, match="expected one in bf16"):
        decide([candidate("fp8_row", 6.0, 0.5)])
