"""Weight files of a random model, as a bundle holds them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from loka_serve.bundle_weights import stored_dtype
from loka_serve.models.config import PRESETS, OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.plan import PrecisionPlan
from loka_serve.quantization.recipes import RECIPES
from loka_serve.tensor_files import TensorWriter

TINY = dataclasses.replace(PRESETS["tiny"], codebook_sizes=(16, 24, 32), max_context=12)


def mixed_plan(model: OneRecV2, dense: str = "fp8_tensor", experts: str = "fp8_block") -> PrecisionPlan:
    """`dense` at linears outside of mixtures of experts, `experts` at the experts, bf16 at routers and heads."""
    recipes = {}
    for site in model.sites():
        recipe = experts if ".moe." in site else dense
        recipes[site] = "bf16" if site.endswith(".router") or site.startswith("heads.") else recipe
    return PrecisionPlan(recipes)


def write_weights(directory: Path, model: OneRecV2, plan: PrecisionPlan, input_amax: float = 4.0) -> list[Path]:
    """The weight files of a bundle; sites in fp8_tensor are calibrated to that largest input."""
    sites = model.sites()
    with TensorWriter(directory, 1 << 30) as writer:
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight") not in sites:
                writer.write(name, parameter.data.to(stored_dtype(parameter)))
        for name, site in sites.items():
            assert site.weight is not None
            for key, tensor in RECIPES[plan[name]].quantize_weight(site.weight.data, input_amax).items():
                writer.write(f"{name}.{key}", tensor)
    return writer.files


def random_model(config: OneRecV2Config = TINY, seed: int = 0) -> OneRecV2:
    return OneRecV2(config).initialize(seed)
