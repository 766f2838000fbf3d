"""Which candidate {library x recipe} runs a site at so many rows: the rule, apart from how candidates were measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .linear.implementations import RECIPES

MAX_FLOORED_MERE = 0.2
MIN_SPEEDUP = 1.05
BASELINE = "bf16"


@dataclass(frozen=True)
class Candidate:
    """One implementation in one recipe, as it was measured.

    Attributes:
        us: microseconds a call.
        mere: floored MERE of its output; None where it was not measured.
    """

    implementation: str
    library: str
    recipe: str
    us: float
    mere: float | None


def by_time(candidate: Candidate) -> tuple[float, str, str]:
    """Sorts the fastest first, and equals always in the same order."""
    return candidate.us, candidate.implementation, candidate.recipe


@dataclass(frozen=True)
class Decision:
    """What runs, and why.

    Attributes:
        bf16_us: of the fastest BF16 candidate; None where none ran.
        runner_up: the fastest of the others that might have been chosen.
        reason: in a few words, why this and nothing faster.
    """

    choice: Candidate
    bf16_us: float | None
    runner_up: Candidate | None
    reason: str


def decide(candidates: Sequence[Candidate], recipes: Collection[str] = RECIPES) -> Decision:
    """The fastest candidate with a floored MERE below 0.2 that is more than 1.05 times as fast as BF16; else BF16.

    Args:
        recipes: what may be chosen beside BF16; the others are measured for comparison alone.

    Raises:
        ValueError: there is nothing to choose from: no candidate in BF16 or in these recipes.
    """
    ranked = sorted(candidates, key=by_time)
    baselines = [candidate for candidate in ranked if candidate.recipe == BASELINE]
    others = [candidate for candidate in ranked if candidate.recipe != BASELINE and candidate.recipe in recipes]
    bf16_us = baselines[0].us if baselines else None
    objections = [objection(candidate, bf16_us) for candidate in others]
    feasible = [candidate for candidate, said in zip(others, objections, strict=True) if not said]
    possible = [*feasible, *baselines]
    if not possible:
        raise ValueError("candidates: expected one in bf16, or one that may replace it")
    choice = possible[0]
    runner_up = min(possible[1:], key=by_time, default=None)
    return Decision(choice, bf16_us, runner_up, _reason(choice, bf16_us, others, objections))


def objection(candidate: Candidate, bf16_us: float | None) -> str:
    """Why a candidate must not replace BF16; empty if it may. A NaN fails every comparison, hence their direction."""
    if candidate.mere is None:
        return "its MERE was not measured"
    if not candidate.mere < MAX_FLOORED_MERE:
        return f"its floored MERE {candidate.mere:.3f} is not below {MAX_FLOORED_MERE:g}"
    if bf16_us is not None and not bf16_us / candidate.us > MIN_SPEEDUP:
        return f"{bf16_us / candidate.us:.2f}x the speed of BF16 is not above {MIN_SPEEDUP:g}x"
    return ""


def _reason(choice: Candidate, bf16_us: float | None, others: Sequence[Candidate], objections: Sequence[str]) -> str:
    if choice.recipe != BASELINE:
        gain = "no BF16 ran" if bf16_us is None else f"{bf16_us / choice.us:.2f}x the speed of BF16"
        return f"{gain}, floored MERE {choice.mere if choice.mere is not None else math.nan:.3f}"
    if not others:
        return "nothing else computes it"
    return f"{others[0].recipe} by {others[0].implementation}: {objections[0]}"
