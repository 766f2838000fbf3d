"""Scores of a level's candidates in a compact table, where child j of beam w stands in column prefix[w] + j.

A scan of the live beams' child counts gives each its columns; then one program a beam stores its children's scores one
behind the other. Beyond the last of them the row is -inf up to its capacity, of which every beam fills a share.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check, check_allowed, check_children, check_prefix
from .reference import AllowedNodes, TrieLevel
from .triton import CHILDREN, MAX_COLUMNS, check_logits, row_blocks, row_log_sum


@triton.jit
def prefix_kernel(beam_counts_ptr, first_child_ptr, nodes_ptr, prefix_ptr, beams, BEAMS_PADDED: tl.constexpr):
    request = tl.program_id(0)
    beam = tl.arange(0, BEAMS_PADDED)
    live = (beam < tl.load(beam_counts_ptr + request)) & (beam < beams)
    node = tl.load(nodes_ptr + request * beams + beam, mask=live, other=0)
    first = tl.load(first_child_ptr + node, mask=live, other=0)
    last = tl.load(first_child_ptr + node + 1, mask=live, other=0)
    prefix_ptr += request * (beams + 1)
    tl.store(prefix_ptr, 0)
    tl.store(prefix_ptr + 1 + beam, tl.cumsum(last - first, axis=0), mask=beam < beams)


@triton.jit
def score_compact_kernel(
    logits_ptr,
    parent_scores_ptr,
    first_child_ptr,
    codes_ptr,
    nodes_ptr,
    bits_ptr,
    filtered_ptr,
    prefix_ptr,
    out_ptr,
    beams,
    bits_stride,
    capacity,
    share,  # columns that each beam fills where there is no candidate
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two; a row is held in registers if it fits, else read in chunks of BLOCK
    CHILDREN: tl.constexpr,
    HAS_PARENT_SCORES: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // beams
    beam = row - request * beams
    prefix_ptr += request * (beams + 1)
    out_ptr += request.to(tl.int64) * capacity
    begin = tl.load(prefix_ptr + beam)
    end = tl.load(prefix_ptr + beam + 1)
    total = tl.load(prefix_ptr + beams)
    each = tl.arange(0, CHILDREN)
    nothing = tl.full([CHILDREN], float("-inf"), tl.float32)
    until = tl.minimum((beam + 1) * share, capacity)
    for start in range(tl.maximum(beam * share, total), until, CHILDREN):
        tl.store(out_ptr + start + each, nothing, mask=start + each < until)
    # Distinct nodes never have more children than the capacity; others must not write elsewhere.
    end = tl.minimum(end, capacity)
    if begin < end:  # so the beam is live
        node = tl.load(nodes_ptr + row)
        first = tl.load(first_child_ptr + node)
        parent_score = 0.0
        if HAS_PARENT_SCORES:
            parent_score = tl.load(parent_scores_ptr + row)
        if HAS_FILTERS:
            end_of_bits = tl.where(tl.load(filtered_ptr + request) != 0, end, 0)
            bits_ptr += request.to(tl.int64) * bits_stride
        logits_ptr += row.to(tl.int64) * CODES
        log_sum, _ = row_log_sum(logits_ptr, CODES, BLOCK)
        for start in range(begin, end, CHILDREN):
            column = start + each
            child = first + (column - begin)
            inside = column < end
            code = tl.load(codes_ptr + child, mask=inside, other=0)
            score = tl.load(logits_ptr + code, mask=inside, other=0.0).to(tl.float32) - log_sum
            if HAS_PARENT_SCORES:
                score += parent_score
            if HAS_FILTERS:
                word = tl.load(bits_ptr + (child >> 5), mask=inside & (column < end_of_bits), other=-1)
                score = tl.where(((word >> (child & 31)) & 1) != 0, score, float("-inf"))
            tl.store(out_ptr + column, score, mask=inside)


def child_prefix(beam_counts: Tensor, children: TrieLevel, nodes: Tensor) -> Tensor:
    """As `reference.child_prefix`; at most 1024 beams.

    Raises:
        ValueError: a wrong type, shape or layout.
    """
    batch, beams = nodes.shape
    check("beam_counts", beam_counts, (batch,))
    check_children(children, nodes, batch, beams)
    prefix = nodes.new_empty(batch, beams + 1)
    check_prefix(prefix, children, batch, beams)
    if batch:
        prefix_kernel[(batch,)](
            beam_counts,
            children.first_child,
            nodes,
            prefix,
            beams,
            BEAMS_PADDED=triton.next_power_of_2(beams),
            num_warps=4,
        )
    return prefix


def score_compact(
    logits: Tensor,
    parent_scores: Tensor | None,
    prefix: Tensor,
    children: TrieLevel,
    nodes: Tensor,
    allowed: AllowedNodes | None,
    capacity: int,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.score_compact`, written to `out` where there is one; `prefix` from `child_prefix` has the counts.

    All tensors contiguous, except that rows of `allowed.bits` may be strided.

    Raises:
        ValueError: a wrong type, shape or layout.
    """
    (batch, beams), codes = nodes.shape, logits.shape[1]
    check_logits(logits, batch)
    if logits.shape[0] != batch * beams:
        raise ValueError(f"logits: expected [{batch} * {beams}, codes], got {list(logits.shape)}")
    if not 0 < capacity <= MAX_COLUMNS:
        raise ValueError(f"capacity {capacity}: expected 1 to {MAX_COLUMNS}")
    if parent_scores is not None:
        check("parent_scores", parent_scores, (batch, beams), torch.float32)
    check_children(children, nodes, batch, beams)
    check_prefix(prefix, children, batch, beams)
    check_allowed(allowed, children, batch)
    out = logits.new_empty(batch, capacity, dtype=torch.float32) if out is None else out
    check("out", out, (batch, capacity), torch.float32)
    if not batch:
        return out
    block, warps = row_blocks(codes)
    score_compact_kernel[(batch * beams,)](
        logits,
        parent_scores,
        children.first_child,
        children.codes,
        nodes,
        None if allowed is None else allowed.bits,
        None if allowed is None else allowed.filtered,
        prefix,
        out,
        beams,
        0 if allowed is None else allowed.bits.stride(0),
        capacity,
        triton.cdiv(capacity, beams),
        CODES=codes,
        BLOCK=block,
        CHILDREN=min(block, CHILDREN),
        HAS_PARENT_SCORES=parent_scores is not None,
        HAS_FILTERS=allowed is not None,
        num_warps=warps,
    )
    return out
