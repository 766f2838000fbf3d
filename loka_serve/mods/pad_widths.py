"""Padding the feed-forward's inner widths to multiples of 128, the tile of FP8 block scales and of the GEMMs.

A padded hidden unit has zero rows in gate and up and a zero column in `down`, so it adds activation(0) * 0 = 0; results
are equal to float32 rounding, as longer sums may run in another order. Only where it costs little: at most 1/8 more.
The other widths stay: d_model is a norm's divisor, heads times head_dim are attention's, a codebook is the catalog's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_serve.models.layers import GroupedLinear, Linear, SparseMoE, SwiGLU
from loka_serve.mods.workspace import Rewrite, Workspace

NAME = "pad_widths"
MULTIPLE = 128
LARGEST_GROWTH = 1 / 8


def pad_widths(work: Workspace) -> list[Rewrite]:
    rewrites = []
    for field in ("d_ff", "expert_width"):
        width = getattr(work.model.config, field)
        padded = padded_width(width)
        if padded != width:
            _resize(work, field, padded)

            def undo(field: str = field, width: int = width) -> None:
                _resize(work, field, width)

            rewrites.append(Rewrite(NAME, f"config {field}", f"{width} -> {padded}", undo))
    return rewrites


def padded_width(width: int) -> int:
    """The next multiple of 128 if it is at most 1/8 more, else the width itself."""
    padded = -(-width // MULTIPLE) * MULTIPLE
    return padded if padded - width <= LARGEST_GROWTH * width else width


def _resize(work: Workspace, field: str, width: int) -> None:
    """Set an inner width throughout the model; units that are cut off are those that padding added."""
    model = work.model
    work.changes_inputs = True
    change: dict[str, Any] = {field: width}
    model.config = dataclasses.replace(model.config, **change)
    for index in range(model.config.layers):
        sparse = model.config.is_sparse(index)
        if sparse != (field == "expert_width"):
            continue
        block = model.get_submodule(f"layers.{index}.{'moe' if sparse else 'mlp'}")
        assert isinstance(block, SwiGLU | SparseMoE)
        _resize_block(block, width)
        if isinstance(block, SparseMoE) and block.shared is not None:
            _resize_block(block.shared, width * model.config.shared_experts)


def _resize_block(block: SwiGLU | SparseMoE, width: int) -> None:
    gate_up, down = block.gate_up, block.down
    old = down.in_features
    _replace(gate_up, "weight", lambda weight: _halves(weight, -2, old, width))
    if isinstance(gate_up, Linear) and gate_up.bias is not None:
        _replace(gate_up, "bias", lambda bias: _halves(bias, -1, old, width))
    _replace(down, "weight", lambda weight: _resized(weight, -1, width))
    gate_up.out_features, down.in_features = 2 * width, width


def _replace(site: Linear | GroupedLinear, leaf: str, change: Callable[[Tensor], Tensor]) -> None:
    setattr(site, leaf, torch.nn.Parameter(change(getattr(site, leaf).data), requires_grad=False))


def _halves(tensor: Tensor, axis: int, old: int, new: int) -> Tensor:
    """Gate and up, each resized."""
    shape = list(tensor.shape)
    shape[axis] = 2 * new
    out = tensor.new_zeros(shape)
    for half in (0, 1):
        kept = min(old, new)
        out.narrow(axis, half * new, kept).copy_(tensor.narrow(axis, half * old, kept))
    return out


def _resized(tensor: Tensor, axis: int, new: int) -> Tensor:
    shape = list(tensor.shape)
    kept = min(shape[axis], new)
    shape[axis] = new
    out = tensor.new_zeros(shape)
    out.narrow(axis, 0, kept).copy_(tensor.narrow(axis, 0, kept))
    return out
