"""What the tensorrt engine runs, and what to install where it cannot, decided before anything is built."""

from __future__ import annotations

from loka_serve.engines.hopper.support import RECIPES as KERNEL_RECIPES
from loka_serve.engines.hopper.support import check_expert_recipe
from loka_serve.errors import EngineError
from loka_serve.quantization.plan import PrecisionPlan

DENSE_RECIPES = ("bf16", "fp8_tensor")
"""Recipes that Q/DQ nodes express."""
EXPERTS = ".moe."
"""In the name of every site that runs in our kernels."""


def runs_in_kernels(site: str) -> bool:
    """Whether a site is part of a mixture of experts, which no dense segment holds."""
    return EXPERTS in site


def preferred_recipes(site: str) -> tuple[str, ...]:
    """Recipes beside bf16 that run at a site, the preferred one first."""
    if not runs_in_kernels(site):
        return ("fp8_tensor",)
    return ("fp8_block",) if not site.endswith(".router") else ("fp8_row",)


def check_recipe(recipe: str) -> None:
    """Raises EngineError for a recipe that no dense site runs; `auto` chooses among those that do."""
    if recipe not in (*DENSE_RECIPES, "auto"):
        expected = ", ".join((*DENSE_RECIPES, "auto"))
        raise EngineError(f"--recipe {recipe}: the tensorrt engine runs {expected}; experts then run fp8_block")


def check_plan(plan: PrecisionPlan) -> None:
    """Raises EngineError for a site whose recipe neither Q/DQ nodes nor the kernels of experts run; names it."""
    for site, recipe in plan.recipes.items():
        expected = KERNEL_RECIPES if runs_in_kernels(site) else DENSE_RECIPES
        if recipe not in expected:
            raise EngineError(f"site {site}: recipe {recipe}: the tensorrt engine runs {', '.join(expected)} there")
        if site.endswith(".moe.down"):
            check_expert_recipe(site, recipe)
