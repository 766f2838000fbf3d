"""`auto`: picks each site's recipe from what the probe measured.

Linear sites (attention, dense feed-forward, context) take fp8_row and grouped ones (experts) fp8_block, as the kernels
for them are fastest; where that recipe's floored MERE is not below 0.2 the other one is tried, then bf16.

Routers and heads decide discretely, so a small output error is not enough there. They stay bf16 unless fp8_row passes
the rule above and, on the calibration rows:

* a router still selects at least 99.9 % of the experts;
* a head keeps at least 99 % of its top 50 codes, and its distribution stays within 0.001 nats of the reference's.

Where speeds were measured (`--dispatch`), a recipe must also be more than 1.05 times as fast as BF16, and the fastest
of those within bounds is taken.

Embeddings and norms are not GEMMs and always stay high.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loka_serve.kernels.dispatch_rule import MAX_FLOORED_MERE as MAX_FLOORED_MERE  # the mods report by it, too
from loka_serve.kernels.dispatch_rule import MIN_SPEEDUP
from loka_serve.probe.measure import RecipeError
from loka_serve.probe.sites import SiteKind
from loka_serve.quantization.recipes import RECIPES

MIN_ROUTING_AGREEMENT = 0.999
MIN_HEAD_OVERLAP = 0.99
MAX_HEAD_KL = 1e-3

PREFERENCES: dict[SiteKind, tuple[str, ...]] = {
    "linear": ("fp8_row", "fp8_block"),
    "grouped": ("fp8_block", "fp8_row"),
    "router": ("fp8_row",),
    "head": ("fp8_row",),
}


@dataclass(frozen=True)
class Choice:
    """A site's recipe and, in a few words, why."""

    recipe: str
    reason: str


def choose(
    kind: SiteKind,
    errors: Mapping[str, RecipeError],
    speedups: Mapping[str, float] | None = None,
    candidates: tuple[str, ...] | None = None,
) -> Choice:
    """The recipe of a site from the errors measured there; no errors (the site saw no rows) means bf16.

    Args:
        speedups: times as fast as BF16 by recipe, at the rows that the site sees; a recipe that is not there does not
            run. None where speeds were not measured.
        candidates: what the engine runs there beside bf16, the preferred one first; None for the usual ones.
    """
    if not errors:
        return Choice("bf16", "no calibration rows reached it")
    reasons: list[str] = []
    order = PREFERENCES[kind] if candidates is None else candidates
    if speedups is not None:
        order = tuple(sorted(order, key=lambda recipe: -speedups.get(recipe, 0.0)))
    for recipe in order:
        objection = _objection(kind, errors[recipe]) or _too_slow(recipe, speedups)
        if objection is None:
            gain = "" if speedups is None else f", {speedups[recipe]:.2f}x the speed of BF16"
            return Choice(recipe, "; ".join([*reasons, f"{recipe} is within bounds{gain}"]))
        reasons.append(f"{recipe}: {objection}")
    return Choice("bf16", "; ".join(reasons))


def _too_slow(recipe: str, speedups: Mapping[str, float] | None) -> str | None:
    if speedups is None:
        return None
    if recipe not in speedups:
        return "no kernel was measured"
    if not speedups[recipe] > MIN_SPEEDUP:
        return f"{speedups[recipe]:.2f}x the speed of BF16 is not above {MIN_SPEEDUP:g}x"
    return None


def fixed(
    kind: SiteKind, recipe: str, errors: Mapping[str, RecipeError], candidates: tuple[str, ...] | None = None
) -> Choice:
    """A recipe asked for by name: at linear and grouped sites. Routers and heads stay bf16, as under `auto`.

    Where the engine does not run it, its first candidate takes the place of one that is not bf16.
    """
    if candidates is not None and recipe not in ("bf16", *candidates) and kind in ("linear", "grouped"):
        return Choice(candidates[0], f"the engine does not run {recipe} here")
    if recipe == "bf16" or kind in ("linear", "grouped"):
        if RECIPES[recipe].needs_input_amax and not errors:
            return Choice("bf16", f"no calibration rows reached it, which {recipe} needs")
        return Choice(recipe, "asked for")
    return Choice("bf16", f"a {kind} stays high")


def _objection(kind: SiteKind, error: RecipeError) -> str | None:
    """Why a recipe must not run at a site, or None. A NaN fails every comparison, hence their direction."""
    mere = error.output.floored_mere
    if not mere < MAX_FLOORED_MERE:
        return f"floored MERE {mere:.3f} is not below {MAX_FLOORED_MERE}"
    worst = error.worst_group_floored_mere
    if worst is not None and not worst < MAX_FLOORED_MERE:
        return f"floored MERE {worst:.3f} in group {error.worst_group} is not below {MAX_FLOORED_MERE}"
    if kind == "router":
        assert error.routing is not None
        if not error.routing >= MIN_ROUTING_AGREEMENT:
            return f"keeps {error.routing:.2%} of the selected experts, below {MIN_ROUTING_AGREEMENT:.1%}"
    if kind == "head":
        assert error.logits is not None
        if not error.logits.top_k_overlap >= MIN_HEAD_OVERLAP:
            return f"keeps {error.logits.top_k_overlap:.2%} of the top codes, below {MIN_HEAD_OVERLAP:.0%}"
        if not error.logits.kl_divergence <= MAX_HEAD_KL:
            return f"KL divergence {error.logits.kl_divergence:.1e} nats is above {MAX_HEAD_KL:.0e}"
    return None
