"""Folding biases where attention lets them, and dropping them where none is left.

Attention weights sum to 1, so the values' bias reaches the output projection as it is: W_o (a + b_v) = W_o a + W_o b_v,
and W_o b_v joins the output's bias. The keys' bias adds the same number to all of a query's scores, which softmax does
not see. Both hold to float32 rounding: a sum runs in another order. The other biases stay: the queries' meets keys that
differ, those of gate and up stand before a product, and those of outputs before the next norm.

Where all that is left is 0, the model becomes one without biases, which every engine runs.
"""

from __future__ import annotations

import dataclasses

import torch

from loka_serve.models.layers import Linear
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.mods.workspace import Rewrite, Workspace

NAME = "fold_biases"


def fold_biases(work: Workspace) -> list[Rewrite]:
    if not work.model.config.linear_bias:
        return []
    rewrites = []
    for index in range(work.model.config.layers):
        name = f"layers.{index}.self_attention"
        qkv, output = work.model.get_submodule(f"{name}.qkv"), work.model.get_submodule(f"{name}.output")
        assert isinstance(qkv, Linear) and isinstance(output, Linear)
        assert qkv.bias is not None and output.bias is not None and output.weight is not None
        width = output.in_features
        if not qkv.bias.data[width:].any():
            continue
        old = (qkv.bias.data, output.bias.data)
        values = qkv.bias.data[2 * width :].float()
        kept = torch.cat([qkv.bias.data[:width], torch.zeros_like(qkv.bias.data[width:])])
        _set(qkv, kept)
        _set(output, output.bias.data.float() + output.weight.data.float() @ values)
        work.changes_inputs = True

        def undo(qkv: Linear = qkv, output: Linear = output, old: tuple[torch.Tensor, torch.Tensor] = old) -> None:
            _set(qkv, old[0])
            _set(output, old[1])

        rewrites.append(Rewrite(NAME, f"{name}.qkv", f"keys and values -> {name}.output", undo))
    return [*rewrites, *_drop_zeros(work.model)]


def _drop_zeros(model: OneRecV2) -> list[Rewrite]:
    biased = [site for site in model.sites().values() if isinstance(site, Linear) and site.bias is not None]
    old = [site.bias for site in biased]
    if any(bias is not None and bool(bias.data.any()) for bias in old):
        return []
    config = model.config
    model.config = dataclasses.replace(config, linear_bias=False)
    for site in biased:
        site.bias = None

    def undo() -> None:
        model.config = config
        for site, bias in zip(biased, old, strict=True):
            site.bias = bias

    return [Rewrite(NAME, "all linears", "no bias is left", undo)]


def _set(site: Linear, bias: torch.Tensor) -> None:
    site.bias = torch.nn.Parameter(bias, requires_grad=False)
