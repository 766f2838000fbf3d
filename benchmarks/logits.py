"""Every level's logits of the hopper engine beside the reference's, for the same beams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loka_serve.engines.base import RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.models.onerec_v2 import DecodeCache

if TYPE_CHECKING:
    from loka_serve.engines.hopper.trace import LevelTrace


@torch.inference_mode()
def logits_of(engine: ReferenceEngine, batch: RequestBatch, traces: Sequence[LevelTrace]) -> list[Tensor]:
    """The reference's float32 logits [requests, beams, V] of each level for the beams that another engine extended.

    Beams beyond a request's live ones are computed on too and mean nothing.
    """
    requests = len(batch)
    context = engine.model.prepare_context(*engine.pad(batch))
    cache = DecodeCache()
    found = []
    for level, trace in enumerate(traces):
        tokens = None
        if trace.codes is not None and trace.parents is not None:
            cache.reorder(trace.parents[:requests].long())
            tokens = trace.codes[:requests].long()
        hidden = engine.model.decode_step(tokens, level, context, cache)
        found.append(engine.model.level_logits(hidden, level))
    return found


def compare_logits(
    found: Sequence[Tensor], expected: Sequence[Tensor], counts: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """A row a level, over live beams: RMS of the difference over RMS of the expected logits, and the largest one.

    A beam's logits are taken from their mean: a shift of all of them moves no probability.
    """
    rows = []
    for level, (ours, theirs, live) in enumerate(zip(found, expected, counts, strict=True)):
        requests = len(theirs)
        alive = torch.arange(theirs.shape[1], device=theirs.device) < live[:requests, None]
        a, b = (logits[:requests][alive].double() for logits in (ours, theirs))
        a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
        difference = a - b
        rows.append(
            {
                "level": level,
                "beams": len(b),
                "relative_rms": float(difference.square().mean().sqrt() / b.square().mean().sqrt()),
                "largest": float(difference.abs().max()),
                "rms": float(b.square().mean().sqrt()),
            }
        )
    return rows
