"""Folding norm gains whole, so that norms are left with 1: for engines whose norm reads no gain.

Not exact: every weight is rounded to its dtype once more, by up to 2**-9 in bfloat16 and 2**-12 in float16; in float32
the function is the same to float32 rounding. Taking it back rounds again. Gains that are 0 stay, and so do those of
rotary keys that serve as values, where a rotation mixes channels of different gains.
"""

from __future__ import annotations

import torch

from loka_serve.mods.groups import channel_groups
from loka_serve.mods.workspace import Rewrite, Workspace

NAME = "fold_whole_norm_gains"


def fold_whole_norm_gains(work: Workspace) -> list[Rewrite]:
    rewrites = []
    for group in channel_groups(work.model):
        if group.gain is None or group.ties is not None:
            continue
        gain = work.model.get_parameter(group.gain).data.float().cpu()
        scales = torch.where(gain == 0, 1.0, gain)
        if (scales == 1).all():
            continue
        readers = ", ".join(part.site for part in group.readers)
        rewrites.append(Rewrite(NAME, group.name, f"{len(gain)} channels -> {readers}", work.scale(group, scales)))
    return rewrites
