"""A level's selection as the engine calls it: scores, top-k, the next beams; no value is read back on the host."""

from __future__ import annotations

from torch import Tensor

from ..radix_topk.cuda import radix_topk
from .reference import AdvancedBeams, AllowedNodes, TrieLevel, topk
from .triton import score_candidates
from .triton_advance import advance_beams
from .triton_compact import child_prefix, score_compact


def score_level(
    logits: Tensor,
    parent_scores: Tensor | None,
    beam_counts: Tensor,
    children: TrieLevel | None,
    nodes: Tensor | None,
    allowed: AllowedNodes | None,
    capacity: int | None = None,
    scores_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The table of a level's candidates, and what `advance_beams` needs to know of it: prefix, None if it is dense.

    Arguments are those of `select_level`.
    """
    if capacity is None:
        return score_candidates(logits, parent_scores, beam_counts, children, nodes, allowed, scores_out), None
    if children is None or nodes is None:
        raise ValueError("capacity: a compact table needs the trie's children and the beams' nodes")
    prefix = child_prefix(beam_counts, children, nodes)
    return score_compact(logits, parent_scores, prefix, children, nodes, allowed, capacity, scores_out), prefix


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
    capacity: int | None = None,
) -> AdvancedBeams:
    """Extend each request's beams by their legal children and keep the best.

    Arguments are those of `score_candidates` and `advance_beams` in reference.py.

    Args:
        k: beams of the result's tensors, at most 1024.
        row_k: int32 [batch], beams kept of each request, clipped to 0..k; None keeps k of all.
        scores_out: float32 [batch, beams * codes], or [batch, capacity], where to put the candidates' scores.
        capacity: columns of a compact table, from `compact_capacity`; the live beams of a request must be distinct
            nodes then. None takes a dense table.
    """
    scores, prefix = score_level(logits, parent_scores, beam_counts, children, nodes, allowed, capacity, scores_out)
    values, indices = (radix_topk if scores.is_cuda else topk)(scores, k, row_k)
    return advance_beams(values, indices, logits.shape[1], children, nodes, in_sid_order, failed, prefix)
