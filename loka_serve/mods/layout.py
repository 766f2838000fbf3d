"""One layout of weights, chosen in the build: [out, in] contiguous, the in-channels of a row next to each other.

Tensor cores take FP8 operands in this order only (both with K innermost), every recipe stores its codes in it, with
scales beside them as the GEMMs read them, and engines run on the stored tensors themselves: what is transposed or
quantized, is so here, once. Values stay bit for bit.
"""

from __future__ import annotations

import torch

from loka_serve.models.layers import GroupedLinear, Linear
from loka_serve.mods.workspace import Rewrite, Workspace

NAME = "layout"


def layout(work: Workspace) -> list[Rewrite]:
    rewrites = []
    for name, site in work.model.sites().items():
        assert site.weight is not None
        strided = site.weight.data
        if strided.is_contiguous():
            continue
        strides = strided.stride()
        _set(site, strided.contiguous())

        def undo(site: Linear | GroupedLinear = site, strides: tuple[int, ...] = strides) -> None:
            assert site.weight is not None
            weight = site.weight.data
            _set(
                site, torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=weight.device).copy_(weight)
            )

        rewrites.append(Rewrite(NAME, name, f"strides {list(strides)} -> contiguous", undo))
    return rewrites


def _set(site: Linear | GroupedLinear, weight: torch.Tensor) -> None:
    site.weight = torch.nn.Parameter(weight, requires_grad=False)
