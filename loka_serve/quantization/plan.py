"""Precision plans: which recipe each site runs. Imports no torch, so that any process can read one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loka_serve.errors import QuantizationError

RECIPE_NAMES = ("bf16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row")


@dataclass(frozen=True)
class PrecisionPlan:
    """Recipe by site, in model order.

    Raises:
        QuantizationError: a recipe that is not one of `RECIPE_NAMES`.
    """

    recipes: Mapping[str, str]

    def __post_init__(self) -> None:
        for site, recipe in self.recipes.items():
            if recipe not in RECIPE_NAMES:
                raise QuantizationError(
                    f"plan, site {site}: unknown recipe {recipe!r}: expected one of {', '.join(RECIPE_NAMES)}"
                )

    def __getitem__(self, site: str) -> str:
        return self.recipes[site]

    @classmethod
    def uniform(cls, sites: Iterable[str], recipe: str) -> PrecisionPlan:
        """The same recipe at every site."""
        return cls(dict.fromkeys(sites, recipe))

    @property
    def quantized_sites(self) -> list[str]:
        """Sites that run in 8 bits."""
        return [site for site, recipe in self.recipes.items() if recipe != "bf16"]

    def check_sites(self, sites: Iterable[str]) -> None:
        """Raises QuantizationError, naming the site, unless the plan covers exactly these sites."""
        expected = list(sites)
        missing = [site for site in expected if site not in self.recipes]
        unknown = sorted(set(self.recipes) - set(expected))
        if missing:
            raise QuantizationError(f"plan: no recipe for site {missing[0]} ({len(missing)} missing)")
        if unknown:
            raise QuantizationError(f"plan: unknown site {unknown[0]}: not part of the model ({len(unknown)} unknown)")

    def to_dict(self) -> dict[str, Any]:
        """The ``plan.json`` form."""
        return {"recipes": dict(self.recipes)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrecisionPlan:
        """Inverse of `to_dict`. Raises QuantizationError for another form."""
        recipes = values.get("recipes")
        if not isinstance(recipes, dict) or not all(isinstance(recipe, str) for recipe in recipes.values()):
            raise QuantizationError('plan: expected an object "recipes" of site name to recipe name')
        return cls(recipes)
