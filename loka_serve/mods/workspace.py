"""What a mod works on: the model, calibration's sample of every site's inputs, and the recipes to be made safe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.mods.channels import (
    LARGEST_EXPONENT,
    ChannelGroup,
    exact_channels,
    power_of_two,
    scale_channels,
    tied_minimum,
)
from loka_serve.probe.collect import SiteInputs
from loka_serve.probe.errors import output_error
from loka_serve.quantization.methods import SiteMethod
from loka_serve.quantization.recipes import RECIPES

Errors = dict[str, dict[str, float]]
"""Floored MERE by site and recipe; of a grouped site's worst group."""
PIECE_ROWS = 256
"""Output channels that are measured together. All weights are in memory then, so what is made on the way stays small.
No scale of a weight spans pieces: they belong to an output channel or to 128 of them."""


@dataclass(frozen=True)
class Rewrite:
    """One change that a mod made.

    Attributes:
        mod, target: the mod's name and what it changed.
        detail: how, in a few words.
        before, after: errors of the sites that read what changed, where they were measured.
        undo: takes it back; rewrites are undone last first.
    """

    mod: str
    target: str
    detail: str
    undo: Callable[[], None] = field(repr=False)
    before: Errors = field(default_factory=dict)
    after: Errors = field(default_factory=dict)


class Workspace:
    """A model while mods are applied; its sites run on plain weights from then on.

    Args:
        model: with its weights.
        inputs: what calibration saw at every site, of this very model; empty if nothing may be measured.
        recipes: whose errors decide whether a scaling helps; none: no scaling that needs a decision is made.
        apart: parameters that the checkpoint held as parts, by name.
    """

    def __init__(
        self,
        model: OneRecV2,
        inputs: Mapping[str, SiteInputs],
        recipes: tuple[str, ...],
        apart: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.model, self.recipes, self.apart = model, recipes, dict(apart or {})
        self.changes_inputs = False  # whether calibration's statistics still hold
        self._inputs = inputs
        self._scales: dict[str, Tensor] = {}  # by which a site's inputs have been divided since calibration
        for site in model.sites().values():
            site.method = None

    def rows(self, site: str) -> tuple[Tensor, Tensor | None]:
        """Sampled inputs of a site as they are now, float32 [M, in], and a grouped site's offsets."""
        if site not in self._inputs:
            return torch.empty(0, self.model.sites()[site].in_features), None
        rows, offsets = self._inputs[site].sample()
        scale = self._scales.get(site)
        if scale is None:
            return rows, offsets
        if scale.ndim == 2:
            assert offsets is not None
            scale = scale.repeat_interleave(offsets.diff(), dim=0)
        return rows / scale, offsets

    def rescale(self, group: ChannelGroup, exponents: Tensor) -> Callable[[], None] | None:
        """Divide a group's channels by powers of two; gives what undoes it, or None where no channel can change.

        Args:
            exponents: int64 `group.shape`; cut to what is exact, and to the smallest among tied channels.
        """
        exponents = exponents.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        if group.ties is not None:
            exponents = tied_minimum(exponents, group.ties)
        exponents = exponents * exact_channels(self.model, group, power_of_two(exponents))
        if not exponents.any():
            return None
        scales = power_of_two(exponents)
        self._scale(group, scales)
        return lambda: self._scale(group, 1 / scales)

    def scale(self, group: ChannelGroup, scales: Tensor) -> Callable[[], None]:
        """As `rescale` by any scales but 0: weights are rounded again, on the way and back."""
        scale_channels(self.model, group, scales)
        self._divide_inputs(group, scales)

        def undo() -> None:
            scale_channels(self.model, group, scales, invert=True)
            self._divide_inputs(group, 1 / scales)

        return undo

    def errors(self, group: ChannelGroup) -> Errors:
        """Floored MERE of each recipe at every site that reads the group's channels and saw rows in calibration."""
        found = {}
        for part in group.readers:
            rows, offsets = self.rows(part.site)
            weight = self.model.sites()[part.site].weight
            assert weight is not None
            if len(rows) and self.recipes:
                found[part.site] = site_errors(weight.data, rows.to(weight.device), offsets, self.recipes)
        return found

    def _scale(self, group: ChannelGroup, scales: Tensor) -> None:
        scale_channels(self.model, group, scales)
        self._divide_inputs(group, scales)

    def _divide_inputs(self, group: ChannelGroup, scales: Tensor) -> None:
        self.changes_inputs = True
        for part in group.readers:
            divisor = scales[..., part.channels]
            self._scales[part.site] = self._scales.get(part.site, torch.ones(())) * divisor


@torch.inference_mode()
def site_errors(weight: Tensor, rows: Tensor, offsets: Tensor | None, recipes: tuple[str, ...]) -> dict[str, float]:
    """Floored MERE of a site's output by recipe against float32; of the worst group with rows.

    Args:
        weight: [out, in] or [groups, out, in]. rows: float32 [M, in], M > 0. offsets: int64 [groups + 1] or None.
    """
    bounds = [0, len(rows)] if offsets is None else offsets.tolist()
    amax = float(rows.abs().max())
    found = dict.fromkeys(recipes, 0.0)
    for matrix, start, end in zip(weight if weight.ndim == 3 else weight[None], bounds[:-1], bounds[1:], strict=True):
        if end == start:
            continue
        inputs = rows[start:end]
        reference = torch.cat([inputs @ piece.float().T for piece in matrix.split(PIECE_ROWS)], 1)
        for name in recipes:
            output = torch.cat([_output(name, piece, inputs, amax) for piece in matrix.split(PIECE_ROWS)], 1)
            error = output_error(output, reference).floored_mere
            found[name] = max(found[name], math.inf if math.isnan(error) else error)
    return found


def _output(name: str, weight: Tensor, inputs: Tensor, amax: float) -> Tensor:
    recipe = RECIPES[name]
    state = recipe.quantize_weight(weight, amax if recipe.needs_input_amax else None)
    return SiteMethod(recipe, state, cache_weight=False)(inputs)


def worst(errors: Errors) -> float:
    """The largest of all; 0 where nothing was measured."""
    return max((value for recipes in errors.values() for value in recipes.values()), default=0.0)
