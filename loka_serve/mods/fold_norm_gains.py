"""Folding norm gains into the linears that read them: W (g * n) = (W * g) n, per column.

Of a gain only the power of two next to it is folded: that is exact in every dtype and leaves gains between 0.71 and
1.41, while the rest would round a stored weight once more and spare E4M3, whose precision is relative, nothing. What is
left of the gain stays in the norm, whose kernel reads it anyway. Gains that are 0 stay, too: a folded 0 could not be
taken back. The norm of the context's values folds into the cross-attention's output, see `groups`.

A large gain may make up for small activations and the other way round, so where the exponents span more than
`UNMEASURED_OCTAVES` the fold stays only if calibration finds no linear clearly worse for it.
"""

from __future__ import annotations

import torch

from loka_serve.mods.groups import channel_groups
from loka_serve.mods.workspace import Rewrite, Workspace, worst

NAME = "fold_norm_gains"
UNMEASURED_OCTAVES = 2
"""E4M3 has 15 octaves of full precision: a spread as small as this moves nothing out of them."""
TOLERATED = 1.1
"""Times the largest error before; codes that fall otherwise move it by some percent either way."""


def fold_norm_gains(work: Workspace) -> list[Rewrite]:
    rewrites = []
    for group in channel_groups(work.model):
        if group.gain is None:
            continue
        exponents = gain_exponents(work.model.get_parameter(group.gain).data)
        spread = int(exponents.max() - exponents.min())
        measured = spread > UNMEASURED_OCTAVES
        before = work.errors(group) if measured else {}
        if measured and not before:
            continue
        undo = work.rescale(group, exponents)
        if undo is None:
            continue
        after = work.errors(group) if measured else {}
        if not worst(after) <= TOLERATED * worst(before):
            undo()
            continue
        changed = int((exponents != 0).sum())
        readers = ", ".join(part.site for part in group.readers)
        rewrites.append(Rewrite(NAME, group.name, f"{changed} channels -> {readers}", undo, before, after))
    return rewrites


def gain_exponents(gain: torch.Tensor) -> torch.Tensor:
    """int64, the nearest power of two of each |gain|; 0 for a gain of 0."""
    return gain.float().abs().log2().round().nan_to_num(neginf=0.0).long().cpu()
