"""Putting recipes into force on a model: each site's method takes the place of its weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loka_serve.errors import QuantizationError
from loka_serve.models.layers import GroupedLinear, Linear
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.plan import PrecisionPlan
from loka_serve.quantization.recipes import RECIPES, State


def apply_plan(
    model: OneRecV2,
    plan: PrecisionPlan,
    input_amax: Mapping[str, float] | None = None,
    cache_weight: bool = True,
) -> None:
    """Quantize a model in place, site by site; each float weight is freed as soon as its site is done.

    Args:
        model: with its weights; runs on the device that they are on.
        input_amax: calibrated largest input magnitude by site; needed by fp8_tensor only.
        cache_weight: see `Recipe.prepare`.

    Raises:
        QuantizationError: the plan does not fit the model, or a site cannot take its recipe; names the site.
    """
    sites = model.sites()
    plan.check_sites(sites)
    for name, site in sites.items():
        if site.weight is None:
            raise QuantizationError(f"site {name}: already quantized: expected a model with its weights")
        recipe = RECIPES[plan[name]]
        try:
            state = recipe.quantize_weight(site.weight.data, (input_amax or {}).get(name))
        except QuantizationError as error:
            raise QuantizationError(f"site {name}: {error}") from error
        attach_method(site, plan[name], state, site.weight.device, cache_weight)


def attach_method(
    site: Linear | GroupedLinear,
    recipe: str,
    state: State,
    device: torch.device | str,
    cache_weight: bool = True,
) -> None:
    """Run a site by a recipe from its stored state; the site's own weight is dropped."""
    site.method = RECIPES[recipe].prepare(state, device, cache_weight)
    site.weight = None


def weight_shape(module: Linear | GroupedLinear) -> tuple[int, ...]:
    """Shape of the site's weight: [out, in] or [groups, out, in]."""
    if isinstance(module, GroupedLinear):
        return (module.groups, module.out_features, module.in_features)
    return (module.out_features, module.in_features)
