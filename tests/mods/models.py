"""Small models with uneven gains, biases and outliers, and what they answer."""

from __future__ import annotations

import dataclasses

import torch

from loka_serve.models.config import PRESETS, FeatureConfig, OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.mods.workspace import Workspace
from loka_serve.probe.collect import SiteInputs, observed

TINY = dataclasses.replace(
    PRESETS["tiny"],
    codebook_sizes=(12, 9, 15),
    max_context=20,
    features=(FeatureConfig("segment", ("new", "regular")),),
)
CONFIGS: dict[str, OneRecV2Config] = {
    "values apart, sparse": TINY,
    "rotary, keys are values": dataclasses.replace(
        TINY, position_encoding="rotary", kv_split=1, kv_layers=2, kv_groups=2, short_term_length=3
    ),
    "recency, keys are values, biases": dataclasses.replace(TINY, kv_split=1, kv_groups=4, linear_bias=True),
    "dense, hard swish, biases": dataclasses.replace(
        TINY, experts=0, shared_experts=0, activation="hard_swish", linear_bias=True
    ),
    "block norm": dataclasses.replace(TINY, norm="block", activation="hard_swish"),
}


def make_model(config: OneRecV2Config, dtype: torch.dtype = torch.float32, seed: int = 0) -> OneRecV2:
    """Random weights; gains from 2**-3 to 2**3, both signs; biases where the configuration has them."""
    model = OneRecV2(config).initialize(seed).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        elif parameter.ndim == 1 and name.endswith("weight"):
            exponents = torch.rand(parameter.shape, generator=generator) * 6 - 3
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.data.copy_(exponents.exp2() * signs)
    return model.to(dtype)


@torch.inference_mode()
def answers(model: OneRecV2, batch: int = 3, length: int = 9) -> list[torch.Tensor]:
    """Logits of every level for random histories and targets."""
    generator = torch.Generator().manual_seed(3)
    sizes = model.config.codebook_sizes
    history = torch.stack([torch.randint(0, size, (batch, length), generator=generator) for size in sizes], -1)
    targets = torch.stack([torch.randint(0, size, (batch, 4), generator=generator) for size in sizes], -1)
    lengths = torch.tensor([length, 4, 0])[:batch]
    context = model.prepare_context(history, lengths, torch.ones(batch, len(model.config.features), dtype=torch.long))
    return model.teacher_forced(context, targets, lengths[:, None].expand(-1, 4))


def calibrated(model: OneRecV2) -> dict[str, SiteInputs]:
    """What every site sees while the model answers."""
    with observed(model) as inputs:
        answers(model)
    return inputs


def workspace(model: OneRecV2, recipes: tuple[str, ...] = ("fp8_row", "fp8_block")) -> Workspace:
    return Workspace(model, calibrated(model), recipes)


def parameters(model: OneRecV2) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for level, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(left, right), (level, (left - right).abs().max())
