"""Inputs of the MoE tests: logits that load the experts in chosen ways, and weights of each recipe."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.kernels.moe.reference import ExpertWeights
from loka_serve.kernels.quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3, quantize_tiles_e4m3

LOADS = ("random", "skewed", "few experts", "one expert")


def make_logits(tokens: int, experts: int, load: str, device: str, seed: int = 0) -> Tensor:
    """Float32 logits [tokens, experts] without ties; `one expert` and `few experts` leave all others empty at top-1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.rand(tokens, experts, generator=generator)
    if load == "skewed":
        logits -= torch.arange(experts) * 0.4
    elif load == "few experts":
        logits[:, experts // 2 :] -= 4
    elif load == "one expert":
        logits[:, experts // 3] += 4
    return logits.to(device)


def quantize_inputs(x: Tensor, recipe: str) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of bfloat16 rows."""
    if recipe == "bf16":
        return x, None
    return (quantize_row_blocks_e4m3 if recipe == "fp8_block" else quantize_rows_e4m3)(x)


def quantize_weight(weight: Tensor, recipe: str) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of a float weight [experts, N, K]."""
    if recipe == "bf16":
        return weight.bfloat16(), None
    return (quantize_tiles_e4m3 if recipe == "fp8_block" else quantize_rows_e4m3)(weight)


def make_weights(experts: int, d_model: int, width: int, recipe: str, device: str) -> ExpertWeights:
    """Gaussian weights of unit gain, with experts of different magnitude so that a mix-up shows."""
    generator = torch.Generator().manual_seed(experts * width)
    magnitude = torch.linspace(0.5, 2.0, experts)[:, None, None]
    gate_up = torch.randn(experts, 2 * width, d_model, generator=generator) / d_model**0.5 * magnitude
    down = torch.randn(experts, d_model, width, generator=generator) / width**0.5 * magnitude
    gate_up_codes, gate_up_scale = quantize_weight(gate_up.to(device), recipe)
    down_codes, down_scale = quantize_weight(down.to(device), recipe)
    return ExpertWeights(gate_up_codes, down_codes, gate_up_scale, down_scale)


def make_rows(tokens: int, width: int, device: str, seed: int = 0) -> Tensor:
    """Bfloat16 rows [tokens, width] whose 128-wide blocks have different magnitudes."""
    rows = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    rows *= torch.linspace(0.2, 3.0, -(-width // 128)).repeat_interleave(128)[:width]
    return rows.bfloat16().to(device)
