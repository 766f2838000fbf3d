"""The build's step between calibration and quantization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loka_serve.models.checkpoint import stored_names
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.models.parts import held_apart
from loka_serve.mods.names import parse_mods
from loka_serve.mods.registry import apply_mods
from loka_serve.mods.report import ModReport, recipes_to_help
from loka_serve.mods.workspace import Workspace
from loka_serve.probe.collect import SiteInputs


def rewrite_model(
    model: OneRecV2, observed: Mapping[str, SiteInputs], mods: str, recipe: str, checkpoint: Path
) -> tuple[ModReport, bool]:
    """Apply mods in place; afterwards the sites run on plain weights, and `model.config` is the new model's.

    Args:
        observed: calibration of this model.
        mods: as `parse_mods` reads it. recipe: of the build; decides whose errors count.
        checkpoint: where the model was read from.

    Returns:
        What was done, and whether the sites' inputs changed so that calibration must look at them again.
    """
    names = parse_mods(mods)
    apart = held_apart(dict(model.named_parameters()), stored_names(checkpoint))
    work = Workspace(model, observed, recipes_to_help(recipe), apart)
    rewrites = apply_mods(work, names)
    return ModReport(names, tuple(rewrites)), work.changes_inputs
