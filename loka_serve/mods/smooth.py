"""Smoothing: per-channel scales move magnitude from activations to weights (SmoothQuant, arXiv 2211.10438).

s_j = sqrt(max |X_j| / max |W_j|), from calibration's sample of inputs, rounded to a power of two so that the function
stays bit for bit; the scale's other side goes into whatever makes the channel: a norm's gain, the rows of `up` or of
the values, the embeddings. Experts have scales of their own. A scaling stays only where it lowers the largest error of
the recipes in question among the linears that read the channels: E4M3 has the same relative precision over 15 octaves,
so most sites need none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.mods.channels import LARGEST_EXPONENT, ChannelGroup
from loka_serve.mods.groups import channel_groups
from loka_serve.mods.workspace import Rewrite, Workspace, worst

NAME = "smooth"
LEAST_OCTAVES = 3
"""Below it no channel is far enough from the others to matter."""
NEEDED = 0.95
"""The largest error must fall to this share of itself."""


def smooth(work: Workspace) -> list[Rewrite]:
    rewrites = []
    for group in channel_groups(work.model):
        if not work.recipes:
            break
        # Cut here, too, so that what is told of a rewrite is what was done.
        exponents = smoothing_exponents(*channel_maxima(work, group)).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        if int(exponents.abs().max()) < LEAST_OCTAVES:
            continue
        before = work.errors(group)
        undo = work.rescale(group, exponents)
        if undo is None:
            continue
        after = work.errors(group)
        if not worst(after) <= NEEDED * worst(before):
            undo()
            continue
        detail = f"{int((exponents != 0).sum())} channels by 2^{int(exponents.min())} to 2^{int(exponents.max())}"
        rewrites.append(Rewrite(NAME, group.name, detail, undo, before, after))
    return rewrites


def smoothing_exponents(inputs: Tensor, weights: Tensor) -> Tensor:
    """Powers of two by which to divide channels, int64 of the same shape.

    Args:
        inputs, weights: largest magnitude of each channel; where one is 0 there is nothing to balance.
    """
    known = (inputs > 0) & (weights > 0)
    if not known.any():
        return torch.zeros(inputs.shape, dtype=torch.int64)
    half = 0.5 * (inputs.log2() - weights.log2())
    # A factor common to all channels changes no scaled value.
    centred = half - half[known].median()
    return torch.where(known, centred.round(), 0.0).long()


def channel_maxima(work: Workspace, group: ChannelGroup) -> tuple[Tensor, Tensor]:
    """Largest |input| and |weight| of each channel over all sites that read it, float32 `group.shape`."""
    inputs, weights = torch.zeros(group.shape), torch.zeros(group.shape)
    sites = work.model.sites()
    for part in group.readers:
        rows, offsets = work.rows(part.site)
        weight = sites[part.site].weight
        assert weight is not None
        # Two reductions: |W| itself would be a copy of the weight.
        columns = torch.maximum(weight.data.amax(-2), -weight.data.amin(-2)).float().cpu()
        if len(group.shape) == 2:
            assert offsets is not None
            bounds = offsets.tolist()
            for expert, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
                if end > start:
                    inputs[expert] = rows[start:end].abs().amax(0).cpu()
            weights = torch.maximum(weights, columns)
            continue
        columns = columns.amax(0) if columns.ndim == 2 else columns
        weights.scatter_reduce_(0, part.channels, columns, "amax")
        if len(rows):
            inputs.scatter_reduce_(0, part.channels, rows.abs().amax(0).cpu(), "amax")
    return inputs, weights
