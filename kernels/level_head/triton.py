"""One program a beam scores its candidates in one pass over its logits, into a row of beams x codes for a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check, check_allowed, check_children
from .reference import AllowedNodes, TrieLevel

MAX_IN_REGISTERS = 16384  # codes; larger codebooks are read in chunks
CHUNK = 8192
CHILDREN = 1024  # at once
# A request's columns end here, so that dead beams can sort behind every index, of which there are at most 1024.
MAX_COLUMNS = 2**31 - 1024


@triton.jit
def row_log_sum(logits_ptr, CODES: tl.constexpr, BLOCK: tl.constexpr):
    """Log of the sum of a row's exponentials; and the row, where a block holds all of it.

    The maximum stays finite, so that infinite logits come out as in torch: no inf - inf but with themselves. A NaN may
    get lost in a maximum, but not in the sum.
    """
    HUGE: tl.constexpr = 3.4028234663852886e38
    column = tl.arange(0, BLOCK)
    if BLOCK >= CODES:
        logits = tl.load(logits_ptr + column, mask=column < CODES, other=float("-inf")).to(tl.float32)
        largest = tl.minimum(tl.maximum(tl.max(logits, axis=0), -HUGE), HUGE)
        total = tl.sum(tl.exp(logits - largest), axis=0)
    else:
        logits = tl.full([BLOCK], float("-inf"), tl.float32)
        largest = -HUGE
        total = 0.0
        for start in range(0, CODES, BLOCK):
            code = start + column
            logits = tl.load(logits_ptr + code, mask=code < CODES, other=float("-inf")).to(tl.float32)
            larger = tl.minimum(tl.maximum(tl.max(logits, axis=0), largest), HUGE)
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logits - larger), axis=0)
            largest = larger
    return tl.log(total) + largest, logits


@triton.jit
def score_kernel(
    logits_ptr,
    parent_scores_ptr,
    beam_counts_ptr,
    first_child_ptr,
    codes_ptr,
    nodes_ptr,
    bits_ptr,
    filtered_ptr,
    out_ptr,
    beams,
    bits_stride,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two; a row is held in registers if it fits, else read in chunks of BLOCK
    CHILDREN: tl.constexpr,
    HAS_PARENT_SCORES: tl.constexpr,
    CONSTRAINED: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // beams
    at = row.to(tl.int64) * CODES
    column = tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    if row - request * beams < tl.load(beam_counts_ptr + request):
        if CONSTRAINED:
            for start in range(0, CODES, BLOCK):
                tl.store(out_ptr + at + start + column, nothing, mask=start + column < CODES)
        log_sum, logits = row_log_sum(logits_ptr + at, CODES, BLOCK)
        parent_score = 0.0
        if HAS_PARENT_SCORES:
            parent_score = tl.load(parent_scores_ptr + row)
        if CONSTRAINED:
            tl.debug_barrier()  # the stores of -inf come before those of the scores, which other threads make
            node = tl.load(nodes_ptr + row)
            last = tl.load(first_child_ptr + node + 1)
            if HAS_FILTERS:
                last_with_bit = tl.where(tl.load(filtered_ptr + request) != 0, last, 0)
            for start in range(tl.load(first_child_ptr + node), last, CHILDREN):
                child = start + tl.arange(0, CHILDREN)
                legal = child < last
                code = tl.load(codes_ptr + child, mask=legal, other=0)
                if HAS_FILTERS:
                    word_ptrs = bits_ptr + request.to(tl.int64) * bits_stride + (child >> 5)
                    word = tl.load(word_ptrs, mask=child < last_with_bit, other=-1)
                    legal = legal & (((word >> (child & 31)) & 1) != 0)
                score = tl.load(logits_ptr + at + code, mask=legal, other=0.0).to(tl.float32) - log_sum
                if HAS_PARENT_SCORES:
                    score += parent_score
                tl.store(out_ptr + at + code, score, mask=legal)
        elif BLOCK >= CODES:
            score = logits - log_sum
            if HAS_PARENT_SCORES:
                score += parent_score
            tl.store(out_ptr + at + column, score, mask=column < CODES)
        else:
            for start in range(0, CODES, BLOCK):
                code = start + column
                score = tl.load(logits_ptr + at + code, mask=code < CODES, other=0.0).to(tl.float32) - log_sum
                if HAS_PARENT_SCORES:
                    score += parent_score
                tl.store(out_ptr + at + code, score, mask=code < CODES)
    else:
        for start in range(0, CODES, BLOCK):
            tl.store(out_ptr + at + start + column, nothing, mask=start + column < CODES)


def row_blocks(codes: int) -> tuple[int, int]:
    """Codes that are read at once, and warps of the program that reads them."""
    block = triton.next_power_of_2(codes) if codes <= MAX_IN_REGISTERS else CHUNK
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16


def check_logits(logits: Tensor, batch: int) -> None:
    """Raise ValueError unless these are the logits of some beams of each request."""
    uneven = logits.shape[0] % batch if batch else logits.shape[0]
    if logits.dtype not in (torch.float32, torch.bfloat16) or not logits.is_contiguous() or uneven:
        raise ValueError(
            f"logits: expected contiguous float32 or bfloat16 [{batch} * beams, codes], "
            f"got {logits.dtype} {list(logits.shape)}"
        )


def score_candidates(
    logits: Tensor,
    parent_scores: Tensor | None,
    beam_counts: Tensor,
    children: TrieLevel | None,
    nodes: Tensor | None,
    allowed: AllowedNodes | None,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.score_candidates`, written to `out` where there is one.

    All tensors contiguous, except that rows of `allowed.bits` may be strided.

    Raises:
        ValueError: a wrong type, shape or layout, or filters without a trie.
    """
    batch, (rows, codes) = len(beam_counts), logits.shape
    beams = rows // max(batch, 1)
    check_logits(logits, batch)
    if beams * codes > MAX_COLUMNS:
        raise ValueError(f"logits: {beams} beams of {codes} codes are more than {MAX_COLUMNS} candidates")
    check("beam_counts", beam_counts, (batch,))
    if parent_scores is not None:
        check("parent_scores", parent_scores, (batch, beams), torch.float32)
    check_children(children, nodes, batch, beams)
    check_allowed(allowed, children, batch)
    out = logits.new_empty(batch, beams * codes, dtype=torch.float32) if out is None else out
    check("out", out, (batch, beams * codes), torch.float32)
    if not rows or not codes:
        return out
    block, warps = row_blocks(codes)
    score_kernel[(rows,)](
        logits,
        parent_scores,
        beam_counts,
        None if children is None else children.first_child,
        None if children is None else children.codes,
        nodes,
        None if allowed is None else allowed.bits,
        None if allowed is None else allowed.filtered,
        out,
        beams,
        0 if allowed is None else allowed.bits.stride(0),
        CODES=codes,
        BLOCK=block,
        CHILDREN=min(block, CHILDREN),
        HAS_PARENT_SCORES=parent_scores is not None,
        CONSTRAINED=children is not None,
        HAS_FILTERS=allowed is not None,
        num_warps=warps,
    )
    return out
