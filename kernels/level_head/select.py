"""A level's selection as the engine calls it: scores, top-k, the next beams; no value is read back on the host."""

from __future__ import annotations

from torch import Tensor

from ..radix_topk.cuda import radix_topk
from .reference import AdvancedBeams, AllowedNodes, TrieLevel, topk
from .triton import advance_beams, score_candidates


def select_level(
    logits: Tensor,
    parent_scores: Tensor | None,
    beam_counts: Tensor,
    children: TrieLevel | None,
    nodes: Tensor | None,
    allowed: AllowedNodes | None,
    k: int,
    row_k: Tensor | None,
    in_sid_order: bool,
    failed: Tensor | None = None,
    scores_out: Tensor | None = None,
) -> AdvancedBeams:
    """Extend each request's beams by their legal children and keep the best.

    Arguments are those of `score_candidates` and `advance_beams` in reference.py.

    Args:
        k: beams of the result's tensors, at most 1024.
        row_k: int32 [batch], beams kept of each request, clipped to 0..k; None keeps k of all.
        scores_out: float32 [batch, beams * codes], where to put the candidates' scores.
    """
    scores = score_candidates(logits, parent_scores, beam_counts, children, nodes, allowed, scores_out)
    values, indices = (radix_topk if scores.is_cuda else topk)(scores, k, row_k)
    return advance_beams(values, indices, logits.shape[1], children, nodes, in_sid_order, failed)
