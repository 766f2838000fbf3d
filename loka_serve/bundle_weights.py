"""The weights of a bundle: which tensors it must hold, writing them, and loading them into a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loka_serve.errors import BundleError, QuantizationError
from loka_serve.models.checkpoint import assign_parameter
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.apply import attach_method, weight_shape
from loka_serve.quantization.plan import PrecisionPlan
from loka_serve.quantization.recipes import RECIPES, State
from loka_serve.tensor_files import read_tensor_file

Expected = dict[str, tuple[torch.dtype, tuple[int, ...]]]


ACTIVATION_VECTORS = ("bos", "context.static")
"""Vectors that enter the activations; with the embeddings, they decide the dtype in which these flow."""


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """How a parameter that belongs to no site is stored: embeddings in bfloat16, vectors (gains, biases) in float32."""
    return torch.bfloat16 if parameter.ndim > 1 else torch.float32


def load_parameter(model: OneRecV2, name: str, tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> None:
    """Set a parameter that belongs to no site; gains and biases stay float32 whatever the activations are."""
    keeps_dtype = tensor.ndim == 1 and name not in ACTIVATION_VECTORS
    assign_parameter(model, name, tensor.to(device=device, dtype=torch.float32 if keeps_dtype else dtype))


def load_weights(
    files: Sequence[Path],
    config: OneRecV2Config,
    plan: PrecisionPlan,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    cache_weight: bool = True,
) -> OneRecV2:
    """Build the model of a bundle from its weight files; arguments and errors as in `Bundle.load_model`."""
    with torch.device("meta"):
        model = OneRecV2(config)
    sites = model.sites()
    try:
        plan.check_sites(sites)
    except QuantizationError as error:
        raise BundleError(str(error)) from error
    parameters = {
        name: (stored_dtype(parameter), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if name.removesuffix(".weight") not in sites
    }
    states: dict[str, Expected] = {
        site: RECIPES[plan[site]].state_shapes(weight_shape(module)) for site, module in sites.items()
    }
    loaded: dict[str, State] = {site: {} for site in sites}
    missing = set(parameters) | {f"{site}.{key}" for site, keys in states.items() for key in keys}

    # float32 files first: a site's scales then wait for its weight, not the much larger weight for its scales.
    for file in sorted(files, key=lambda path: (not path.name.startswith("weights-f32-"), path.name)):
        for name, tensor in read_tensor_file(file):
            site, _, key = name.rpartition(".")
            expected = parameters.get(name) or states.get(site, {}).get(key)  # a site's bias is a parameter
            _check_tensor(file, name, tensor, expected, name in missing)
            missing.discard(name)
            if name in parameters:
                load_parameter(model, name, tensor, device, dtype or torch.float32)
                continue
            loaded[site][key] = tensor
            del tensor  # attach_method may make a copy and drop this one
            if len(loaded[site]) == len(states[site]):
                attach_method(sites[site], plan[site], loaded.pop(site), device, cache_weight)
    if missing:
        raise BundleError(
            f"{files[0].parent if files else 'bundle'}: missing tensor {min(missing)} ({len(missing)} in all)"
        )
    return model.eval()


def _check_tensor(
    file: Path, name: str, tensor: Tensor, expected: tuple[torch.dtype, tuple[int, ...]] | None, is_missing: bool
) -> None:
    if expected is None:
        raise BundleError(f"{file}: unknown tensor {name}: not part of the model and its plan")
    if not is_missing:
        raise BundleError(f"{file}: tensor {name} is there twice")
    if (tensor.dtype, tuple(tensor.shape)) != expected:
        raise BundleError(
            f"{file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}: expected {expected[0]} {list(expected[1])}"
        )
