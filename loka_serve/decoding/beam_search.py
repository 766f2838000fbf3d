"""Exact beam search over the SIDs that exist: one decode step a level, selection among legal children only.

Between levels the beams of a request stay in SID order, not in score order. A candidate's position is then its place in
the catalog, so top-k's rule "ties to the lower index" is the answer's rule "ties to the lower item".
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka_serve.decoding.trie_tensors import TrieTensors
from loka_serve.kernels.radix_topk.reference import radix_topk
from loka_serve.models.onerec_v2 import Context, DecodeCache, OneRecV2


@dataclass
class StageTimer:
    """Seconds by stage, and by level as `decode.0`; on a CUDA device each stage ends with a synchronisation."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, level: int | None = None) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if level is not None:
            self.seconds[f"{name}.{level}"] = seconds


@dataclass(frozen=True)
class Beams:
    """Live prefixes of each request.

    Attributes:
        nodes: int64 [batch, beams], trie node at the current level, -1 where a request has fewer.
        scores: float32 [batch, beams], summed log-probability, -inf where a request has fewer.
        parents: int64 [batch, beams], position of each beam's parent one level up, 0 where there is none.
        failed: bool [batch], requests that met a score that is not a number.
    """

    nodes: Tensor
    scores: Tensor
    parents: Tensor
    failed: Tensor


def beam_search(
    model: OneRecV2,
    trie: TrieTensors,
    context: Context,
    beam_widths: Tensor,
    allowed: list[Tensor] | None = None,
    timer: StageTimer | None = None,
) -> Beams:
    """Best leaves of each request.

    Args:
        beam_widths: int64 [batch], beams kept after each level.
        allowed: per level bool [batch, nodes], from `stack_filters`.

    Returns:
        Beams at the last level, best score first, equal scores in leaf order.
    """
    timer = timer or StageTimer(beam_widths.device)
    cache = DecodeCache()
    beams: Beams | None = None
    for level in range(trie.levels):
        with timer.stage("decode", level):
            tokens = None
            if beams is not None:
                cache.reorder(beams.parents)
                tokens = trie.codes[level - 1][beams.nodes.clamp(min=0)]
            hidden = model.decode_step(tokens, level, context, cache)
            logits = model.level_logits(hidden, level)
        with timer.stage("selection", level):
            is_last = level == trie.levels - 1
            mask = None if allowed is None else allowed[level]
            beams = select(logits, beams, trie, level, beam_widths, mask, in_score_order=is_last)
    assert beams is not None
    return beams


def select(
    logits: Tensor,
    beams: Beams | None,
    trie: TrieTensors,
    level: int,
    beam_widths: Tensor,
    allowed: Tensor | None,
    in_score_order: bool,
) -> Beams:
    """Extend each beam by its legal children and keep the best `beam_widths` of each request.

    Log-probabilities are over the level's whole codebook, before masking.

    Args:
        logits: float32 [batch, beams, codes].
        beams: the beams that `logits` belong to, in SID order; None at the first level.
        allowed: bool [batch, nodes of this level], or None.
    """
    batch, width, _ = logits.shape
    rows, parents, children = _legal_children(beams, trie, level, batch, logits.device)
    if allowed is not None:
        keep = allowed[rows, children]
        rows, parents, children = rows[keep], parents[keep], children[keep]
    log_probabilities = logits - logits.logsumexp(-1, keepdim=True)
    scores = log_probabilities[rows, parents, trie.codes[level][children]]
    if beams is not None:
        scores = scores + beams.scores[rows, parents]

    if not len(rows):
        # One dead beam keeps the shapes of the next step valid.
        dead = torch.full((batch, 1), -1, device=rows.device)
        failed = torch.zeros(batch, dtype=torch.bool, device=rows.device) if beams is None else beams.failed
        return Beams(dead, logits.new_full((batch, 1), float("-inf")), torch.zeros_like(dead), failed)
    counts = torch.bincount(rows, minlength=batch)
    first = counts.cumsum(0) - counts
    columns = torch.arange(len(rows), device=rows.device) - first[rows]
    table = scores.new_full((batch, int(counts.max())), float("-inf"))
    table[rows, columns] = scores
    values, picked = radix_topk(table, torch.minimum(beam_widths, counts))

    failed = torch.zeros(batch, dtype=torch.bool, device=rows.device)
    failed[rows[scores.isnan()]] = True
    if beams is not None:
        failed |= beams.failed
    if not in_score_order:
        picked, order = picked.masked_fill(picked < 0, table.shape[1]).sort(dim=1)
        picked = picked.masked_fill(picked == table.shape[1], -1)
        values = values.gather(1, order)
    empty = picked < 0
    edges = (first[:, None] + picked.clamp(min=0)).clamp(max=len(rows) - 1)
    return Beams(children[edges].masked_fill(empty, -1), values, parents[edges].masked_fill(empty, 0), failed)


def _legal_children(
    beams: Beams | None, trie: TrieTensors, level: int, batch: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(request, position of the parent beam, child node) of every legal extension, in request, then SID order."""
    if beams is None:
        roots = len(trie.codes[0])
        rows = torch.arange(batch, device=device).repeat_interleave(roots)
        return rows, torch.zeros_like(rows), torch.arange(roots, device=device).repeat(batch)
    rows, parents = (beams.nodes >= 0).nonzero(as_tuple=True)
    nodes = beams.nodes[rows, parents]
    first, counts = trie.first_child[level - 1][nodes], trie.first_child[level - 1].diff()[nodes]
    owner = torch.arange(len(nodes), device=device).repeat_interleave(counts)
    offset = torch.arange(len(owner), device=device) - (counts.cumsum(0) - counts)[owner]
    return rows[owner], parents[owner], first[owner] + offset
