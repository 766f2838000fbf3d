"""What mods did: the record in the bundle, errors before and after in ``probe.json``, the lines that are printed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from loka_serve.mods.names import OFFERED_MODS, RECORD_VERSION
from loka_serve.mods.registry import MODS
from loka_serve.mods.workspace import Errors, Rewrite
from loka_serve.probe.choose import MAX_FLOORED_MERE


@dataclass(frozen=True)
class ModReport:
    """The mods that were asked for, in order, and every rewrite they made."""

    asked: tuple[str, ...]
    rewrites: tuple[Rewrite, ...]

    def errors(self) -> tuple[Errors, Errors]:
        """Floored MERE by site and recipe before the first and after the last rewrite that was measured there."""
        before: Errors = {}
        after: Errors = {}
        for rewrite in self.rewrites:
            for site, errors in rewrite.before.items():
                before.setdefault(site, errors)
                after[site] = rewrite.after[site]
        return before, after

    def became_safe(self) -> dict[str, list[str]]:
        """Recipes by site whose floored MERE fell below the bound that recipes are chosen by."""
        before, after = self.errors()
        found = {
            site: [
                recipe
                for recipe, error in errors.items()
                if error >= MAX_FLOORED_MERE and after[site][recipe] < MAX_FLOORED_MERE
            ]
            for site, errors in before.items()
        }
        return {site: recipes for site, recipes in found.items() if recipes}

    def record(self) -> dict[str, Any]:
        """The ``bundle.json`` form: which mods, and how often each changed something."""
        counts = {name: sum(rewrite.mod == name for rewrite in self.rewrites) for name in self.asked}
        applied = [
            {"name": name, "exact": MODS[name].exact, "rewrites": count} for name, count in counts.items() if count
        ]
        return {"version": RECORD_VERSION, "asked": list(self.asked), "applied": applied}

    def to_dict(self) -> dict[str, Any]:
        """The ``probe.json`` form: every rewrite, and the measured sites' errors; infinite ones become null."""
        before, after = self.errors()
        return {
            **self.record(),
            "rewrites": [
                {"mod": rewrite.mod, "target": rewrite.target, "detail": rewrite.detail} for rewrite in self.rewrites
            ],
            "sites": {
                site: {
                    recipe: {"before": _finite(error), "after": _finite(after[site][recipe])}
                    for recipe, error in errors.items()
                }
                for site, errors in before.items()
            },
            "became_safe": self.became_safe(),
        }

    def lines(self) -> list[str]:
        """For people: one line for all that was applied and is offered, one for each site that became safe."""
        record = self.record()
        applied = (
            ", ".join(f"{mod['name']} ({mod['rewrites']})" for mod in record["applied"]) or "none changed anything"
        )
        offers = "; ".join(f"{name}: {MODS[name].summary}" for name in OFFERED_MODS if name not in self.asked)
        before, after = self.errors()
        return [
            f"mods: {applied}" + (f" (not exact, with --mods all: {offers})" if offers else ""),
            *(
                f"mods: {site} became safe: floored MERE of {recipe} {before[site][recipe]:.3f} -> "
                f"{after[site][recipe]:.3f}"
                for site, recipes in self.became_safe().items()
                for recipe in recipes
            ),
        ]


def recipes_to_help(recipe: str) -> tuple[str, ...]:
    """The recipes that mods make safe for a build with this ``--recipe``."""
    if recipe == "auto":
        return ("fp8_row", "fp8_block")
    return () if recipe == "bf16" else (recipe,)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
