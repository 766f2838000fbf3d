"""A level's selection by our top-k, or by the library's for comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.kernels.level_head.reference import AdvancedBeams, AllowedNodes, TrieLevel
from loka_serve.kernels.level_head.select import score_level, select_level
from loka_serve.kernels.level_head.triton_advance import advance_beams


def select(
    logits: Tensor,
    beams: AdvancedBeams | None,
    beam_counts: Tensor,
    children: TrieLevel | None,
    allowed: AllowedNodes | None,
    beam_widths: Tensor,
    k: int,
    capacity: int | None,
    is_last: bool,
    options: HopperOptions,
) -> AdvancedBeams:
    """The best k beams of each request after a level, in SID order unless it is the last.

    Args:
        logits: float32 [B * W, V]. beams: what they belong to, None at level 0. beam_widths: int32 [B].
        capacity: columns of a compact table of candidates, None for a dense one.
    """
    scores = None if beams is None else beams.scores
    nodes = torch.zeros(len(beam_counts), 1, dtype=torch.int32, device=logits.device) if beams is None else beams.nodes
    failed = None if beams is None else beams.failed
    if options.top_k == "radix":
        return select_level(
            logits,
            scores,
            beam_counts,
            children,
            nodes,
            allowed,
            k,
            beam_widths,
            not is_last,
            failed,
            capacity=capacity,
        )
    candidates, prefix = score_level(logits, scores, beam_counts, children, nodes, allowed, capacity)
    kept = min(k, candidates.shape[1])
    values, indices = candidates.topk(kept, dim=1)
    beyond = torch.arange(kept, device=logits.device) >= beam_widths[:, None]
    values = torch.nn.functional.pad(values.masked_fill(beyond, float("-inf")), (0, k - kept), value=float("-inf"))
    places = torch.nn.functional.pad(indices.int().masked_fill(beyond, -1), (0, k - kept), value=-1)
    return advance_beams(values, places, logits.shape[1], children, nodes, not is_last, failed, prefix)
