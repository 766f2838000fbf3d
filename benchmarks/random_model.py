"""Random weights of any preset, made on the device itself: four billion of them take a second there."""

from __future__ import annotations

import torch

from loka_serve.bundle_weights import ACTIVATION_VECTORS
from loka_serve.models.checkpoint import assign_parameter
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2


def random_model(config: OneRecV2Config, device: torch.device | str, seed: int = 0) -> OneRecV2:
    """Weights as `OneRecV2.initialize` has them: sites N(0, 1 / in), embeddings N(0, 1), gains 1, biases 0.

    Sites, embeddings and vectors of activations are bfloat16, gains and biases float32, as a bundle loads them.
    """
    with torch.device("meta"):
        model = OneRecV2(config)
    generator = torch.Generator(device).manual_seed(seed)
    sites = {f"{name}.weight" for name in model.sites()}
    for name, parameter in list(model.named_parameters()):
        shape = tuple(parameter.shape)
        if parameter.ndim == 1 and name not in ACTIVATION_VECTORS:
            value = 0.0 if name.endswith("selection_bias") else 1.0
            assign_parameter(model, name, torch.full(shape, value, device=device))
            continue
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        if name in sites:
            weight.mul_(shape[-1] ** -0.5)
        assign_parameter(model, name, weight)
    return model.eval()
