"""What happens between a level's logits and the next decode step, in plain PyTorch, and the tensors it is told in.

Candidates of a request stand in one row: of beams x codes columns in the dense table, in the compact one only of the
children of live beams, one beam's behind the other's. Beams are in SID order, so in both the order of columns is that
of the catalog, and top-k's rule "ties to the lower index" is the answer's rule "ties to the lower item".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..radix_topk.reference import radix_topk

ALIGNMENT = 16  # columns; top-k reads whole vectors of rows that begin at a multiple of four


@dataclass(frozen=True, eq=False)
class TrieLevel:
    """Nodes of a level below the nodes of the level above; level 0 hangs from one root, with first_child = [0, nodes].

    Attributes:
        first_child: int32 [parents + 1]; children of parent p are the nodes first_child[p] to first_child[p + 1].
        codes: int32 [nodes], ascending among siblings.

    Both may be followed by room for more, of which nothing is read.
    """

    first_child: Tensor
    codes: Tensor


@dataclass(frozen=True, eq=False)
class AllowedNodes:
    """Which nodes of a level each request may reach.

    Attributes:
        bits: int32 [batch, at least ceil(nodes / 32)], packed by `pack_allowed`.
        filtered: int32 [batch]; where it is 0 everything is allowed and the request's bits are never read.
    """

    bits: Tensor
    filtered: Tensor


@dataclass(frozen=True, eq=False)
class AdvancedBeams:
    """Beams after a level, live ones first. A dead beam has node -1, code 0, parent 0 and score -inf.

    Attributes:
        nodes, codes: int32 [batch, k], the beam's node of this level and that node's code.
        scores: float32 [batch, k], summed log-probability.
        parents: int32 [batch, k], the place among the beams before that it continues.
        counts: int32 [batch], live beams.
        failed: int32 [batch], 1 where a score so far was not a number.
    """

    nodes: Tensor
    codes: Tensor
    scores: Tensor
    parents: Tensor
    counts: Tensor
    failed: Tensor


def pack_allowed(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """int32 [ceil(nodes / 32)] from bool [nodes]: node n is bit n % 32 of word n / 32."""
    words = np.zeros(-(-len(allowed) // 32), dtype="<i4")
    packed = np.packbits(allowed, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words.astype(np.int32, copy=False)


def score_candidates(
    logits: Tensor,
    parent_scores: Tensor | None,
    beam_counts: Tensor,
    children: TrieLevel | None,
    nodes: Tensor | None,
    allowed: AllowedNodes | None,
) -> Tensor:
    """Score of every code after every beam, -inf where the code is not a legal and allowed child of a live beam.

    The score is the code's log-probability over the whole codebook plus the beam's score. A row of logits that has a
    NaN makes all its candidates NaN.

    Args:
        logits: float32 or bfloat16 [batch * beams, codes].
        parent_scores: float32 [batch, beams]; None adds nothing, as at the first level.
        beam_counts: int32 [batch], live beams, which stand first.
        children: the nodes of this level; None makes every code legal.
        nodes: int32 [batch, beams], each beam's node at the level above (0, the root, at the first level); only read
            with `children`, and only of live beams.
        allowed: None allows everything.

    Returns:
        float32 [batch, beams * codes].
    """
    codes = logits.shape[1]
    batch, beams = len(beam_counts), logits.shape[0] // max(len(beam_counts), 1)
    wide = logits.float().view(batch, beams, codes)
    scores = wide - wide.logsumexp(-1, keepdim=True)
    if parent_scores is not None:
        scores = scores + parent_scores[:, :, None]
    live = torch.arange(beams, device=logits.device) < beam_counts[:, None]
    legal = live[:, :, None].expand(batch, beams, codes)
    if children is not None:
        assert nodes is not None
        legal = _legal(live, children, nodes, allowed, codes)
    return scores.masked_fill(~legal, float("-inf")).flatten(1)


def _legal(live: Tensor, children: TrieLevel, nodes: Tensor, allowed: AllowedNodes | None, codes: int) -> Tensor:
    rows, beams, _, child = _extensions(live, children, nodes)
    if allowed is not None:
        bit = (allowed.bits[rows, child // 32] >> (child % 32).int()) & 1
        keep = (bit != 0) | (allowed.filtered[rows] == 0)
        rows, beams, child = rows[keep], beams[keep], child[keep]
    legal = torch.zeros(*live.shape, codes, dtype=torch.bool, device=live.device)
    legal[rows, beams, children.codes[child].long()] = True
    return legal


def _extensions(live: Tensor, children: TrieLevel, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(request, beam, place among the beam's children, child node) of every child of a live beam."""
    rows, beams = live.nonzero(as_tuple=True)
    parents = nodes[rows, beams].long()
    first = children.first_child.long()
    counts = first.diff()[parents]
    owner = torch.arange(len(parents), device=live.device).repeat_interleave(counts)
    offset = torch.arange(len(owner), device=live.device) - (counts.cumsum(0) - counts)[owner]
    return rows[owner], beams[owner], offset, first[parents][owner] + offset


def compact_capacity(child_counts: NDArray[np.integer], beams: int) -> int:
    """Columns that hold the children of any `beams` distinct nodes of a level, with rows that stay aligned.

    Args:
        child_counts: integers [nodes], children of each node of the level above.
        beams: beams of a request, at least 1.
    """
    if beams < len(child_counts):
        child_counts = np.partition(child_counts, -beams)[-beams:]
    return align_capacity(int(child_counts.sum(dtype=np.int64)))


def align_capacity(columns: int) -> int:
    """The next capacity that keeps every row aligned."""
    return max(-(-columns // ALIGNMENT), 1) * ALIGNMENT


def child_prefix(beam_counts: Tensor, children: TrieLevel, nodes: Tensor) -> Tensor:
    """Where each beam's children begin in a compact table, and at last where they all end: int32 [batch, beams + 1]."""
    live = torch.arange(nodes.shape[1], device=nodes.device) < beam_counts[:, None]
    counts = children.first_child.long().diff()[nodes.long().masked_fill(~live, 0)].masked_fill(~live, 0)
    return torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()


def score_compact(
    logits: Tensor,
    parent_scores: Tensor | None,
    beam_counts: Tensor,
    children: TrieLevel,
    nodes: Tensor,
    allowed: AllowedNodes | None,
    capacity: int,
) -> Tensor:
    """The scores of `score_candidates` in a compact table: child j of beam w in column prefix[w] + j.

    Args:
        capacity: columns of the table; what would stand beyond is dropped, so use `compact_capacity`.

    Returns:
        float32 [batch, capacity], -inf where there is no candidate, or one that is not allowed.
    """
    codes = logits.shape[1]
    dense = score_candidates(logits, parent_scores, beam_counts, children, nodes, allowed)
    live = torch.arange(nodes.shape[1], device=nodes.device) < beam_counts[:, None]
    rows, beams, offset, child = _extensions(live, children, nodes)
    columns = child_prefix(beam_counts, children, nodes)[rows, beams] + offset
    table = dense.new_full((len(dense), max(capacity, int(columns.max()) + 1 if len(columns) else 0)), float("-inf"))
    table[rows, columns] = dense[rows, beams * codes + children.codes[child]]
    return table[:, :capacity]


def advance_beams(
    values: Tensor,
    indices: Tensor,
    codes: int,
    children: TrieLevel | None,
    nodes: Tensor | None,
    in_sid_order: bool,
    failed: Tensor | None = None,
    prefix: Tensor | None = None,
) -> AdvancedBeams:
    """The beams that a top-k over `score_candidates`, or over `score_compact`, chose.

    Args:
        values, indices: float32 and int32 [batch, k], best first; an index of -1 or a value of -inf is no beam.
        codes: size of the level's codebook.
        children, nodes: as `score_candidates` had them; without `children` a beam's node is its code.
        in_sid_order: live beams in order of index, as the next level needs them; otherwise they stay best first.
        failed: int32 [batch], requests that failed before.
        prefix: int32 [batch, beams + 1] from `child_prefix`, if the table is compact.
    """
    live = (indices >= 0) & (values != float("-inf"))
    place = indices if in_sid_order else torch.arange(indices.shape[1], device=indices.device).expand_as(indices)
    order = place.masked_fill(~live, torch.iinfo(torch.int32).max).sort(dim=1, stable=True).indices
    live, index = live.gather(1, order), indices.gather(1, order).long()
    scores = values.gather(1, order).masked_fill(~live, float("-inf"))
    index = index.masked_fill(~live, 0)
    parents, code = index // codes, index % codes
    node = code
    if prefix is not None:
        assert children is not None and nodes is not None
        parents = torch.searchsorted(prefix[:, 1:].long().contiguous(), index, right=True).masked_fill(~live, 0)
        above = nodes.long().gather(1, parents).masked_fill(~live, 0)
        node = (children.first_child.long()[above] + index - prefix.long().gather(1, parents)).masked_fill(~live, 0)
        code = children.codes[node].masked_fill(~live, 0)
    elif children is not None:
        assert nodes is not None
        # Nodes are numbered by parent, then code, so one ascending key finds any of them.
        owners = torch.arange(len(children.first_child) - 1, device=values.device)
        counts = children.first_child.long().diff().clamp(min=0)  # below zero where room for more nodes begins
        keys = owners.repeat_interleave(counts) * codes + children.codes[: int(counts.sum())]
        node = torch.searchsorted(keys, nodes.long().gather(1, parents) * codes + code)
    bad = values.isnan().any(1).int()
    return AdvancedBeams(
        nodes=node.masked_fill(~live, -1).int(),
        codes=code.int(),
        scores=scores,
        parents=parents.int(),
        counts=live.sum(1, dtype=torch.int32),
        failed=bad if failed is None else failed | bad,
    )


def topk(scores: Tensor, k: int, row_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """`radix_topk` of the CUDA kernel's shape: k entries for each row, int32 indices."""
    wanted = torch.full((len(scores),), k) if row_k is None else row_k.long().clamp(0, k)
    found, places = radix_topk(scores, wanted)
    values = scores.new_full((len(scores), k), float("-inf"))
    indices = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
    values[:, : found.shape[1]], indices[:, : found.shape[1]] = found, places.int()
    return values, indices
