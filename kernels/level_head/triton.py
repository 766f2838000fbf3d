"""One program a beam scores its candidates in one pass over its logits; one small kernel places the chosen beams."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check, check_allowed, check_children
from .reference import AdvancedBeams, AllowedNodes, TrieLevel

MAX_K = 1024
MAX_IN_REGISTERS = 16384  # codes; larger codebooks are read in chunks
CHUNK = 8192
CHILDREN = 1024  # at once
BEAMS = 32  # placed by one program
# A request's columns end here, so that dead beams can sort behind every index.
MAX_COLUMNS = 2**31 - MAX_K


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
    HUGE: tl.constexpr = 3.4028234663852886e38
    row = tl.program_id(0)
    request = row // beams
    at = row.to(tl.int64) * CODES
    column = tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    if row - request * beams < tl.load(beam_counts_ptr + request):
        # The maximum stays finite, so that infinite logits come out as in torch: no inf - inf but with themselves. A
        # NaN may get lost in a maximum, but not in the sum.
        if BLOCK >= CODES:
            logits = tl.load(logits_ptr + at + column, mask=column < CODES, other=float("-inf")).to(tl.float32)
            if CONSTRAINED:
                tl.store(out_ptr + at + column, nothing, mask=column < CODES)
            largest = tl.minimum(tl.maximum(tl.max(logits, axis=0), -HUGE), HUGE)
            total = tl.sum(tl.exp(logits - largest), axis=0)
        else:
            largest = -HUGE
            total = 0.0
            for start in range(0, CODES, BLOCK):
                code = start + column
                logits = tl.load(logits_ptr + at + code, mask=code < CODES, other=float("-inf")).to(tl.float32)
                if CONSTRAINED:
                    tl.store(out_ptr + at + code, nothing, mask=code < CODES)
                larger = tl.minimum(tl.maximum(tl.max(logits, axis=0), largest), HUGE)
                total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logits - larger), axis=0)
                largest = larger
        log_sum = tl.log(total) + largest
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


@triton.jit
def advance_kernel(
    values_ptr,
    indices_ptr,
    first_child_ptr,
    codes_ptr,
    nodes_ptr,
    failed_before_ptr,
    out_node_ptr,
    out_code_ptr,
    out_score_ptr,
    out_parent_ptr,
    count_ptr,
    failed_ptr,
    k,
    beams,
    CODES: tl.constexpr,
    K_PADDED: tl.constexpr,  # power of two, at least k
    BEAMS: tl.constexpr,
    CONSTRAINED: tl.constexpr,
    IN_SID_ORDER: tl.constexpr,
    FAILED_BEFORE: tl.constexpr,
):
    DEAD: tl.constexpr = 2**31 - 1024
    WAYS: tl.constexpr = 16
    request = tl.program_id(0)
    every = tl.arange(0, K_PADDED)
    every_value = tl.load(values_ptr + request * k + every, mask=every < k, other=float("-inf"))
    every_index = tl.load(indices_ptr + request * k + every, mask=every < k, other=-1)
    every_live = (every_index >= 0) & (every_value != float("-inf"))
    every_key = tl.where(every_live, every_index if IN_SID_ORDER else every, DEAD + every)

    own = tl.program_id(1) * BEAMS + tl.arange(0, BEAMS)
    inside = own < k
    value = tl.load(values_ptr + request * k + own, mask=inside, other=float("-inf"))
    index = tl.load(indices_ptr + request * k + own, mask=inside, other=-1)
    live = (index >= 0) & (value != float("-inf"))
    key = tl.where(live, index if IN_SID_ORDER else own, DEAD + own)
    # Keys differ, so the number of smaller ones is a place of its own.
    place = tl.sum((every_key[None, :] < key[:, None]).to(tl.int32), axis=1)

    index = tl.where(live, index, 0)
    parent = index // CODES
    code = index - parent * CODES
    node = code
    if CONSTRAINED:
        above = tl.load(nodes_ptr + request * beams + parent, mask=live, other=0)
        first = tl.load(first_child_ptr + above, mask=live, other=0)
        last = tl.load(first_child_ptr + above + 1, mask=live, other=0)
        # Search in WAYS parts at a time, since what counts is how many loads wait for each other. The child is the last
        # one whose code is not above the beam's, and it is in first..last - 1.
        size = tl.max(last - first, axis=0)
        way = tl.arange(0, WAYS)[None, :]
        while size > 1:
            step = (last - first + WAYS - 1) // WAYS
            probe = first[:, None] + way * step[:, None]
            probed = tl.load(codes_ptr + probe, mask=probe < last[:, None], other=2**31 - 1)
            passed = tl.sum((probed <= code[:, None]).to(tl.int32), axis=1)
            first += tl.maximum(passed - 1, 0) * step
            last = tl.minimum(first + step, last)
            size = (size + WAYS - 1) // WAYS
        node = first
    at = request * k + place
    tl.store(out_node_ptr + at, tl.where(live, node, -1), mask=inside)
    tl.store(out_code_ptr + at, code, mask=inside)
    tl.store(out_score_ptr + at, tl.where(live, value, float("-inf")), mask=inside)
    tl.store(out_parent_ptr + at, parent, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(count_ptr + request, tl.sum(every_live.to(tl.int32), axis=0))
        failed = tl.max((every_value != every_value).to(tl.int32), axis=0)
        if FAILED_BEFORE:
            failed = failed | tl.load(failed_before_ptr + request)
        tl.store(failed_ptr + request, failed)


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
    if logits.dtype not in (torch.float32, torch.bfloat16) or not logits.is_contiguous() or rows != batch * beams:
        raise ValueError(
            f"logits: expected contiguous float32 or bfloat16 [{batch} * beams, codes], "
            f"got {logits.dtype} {list(logits.shape)}"
        )
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
    block = triton.next_power_of_2(codes) if codes <= MAX_IN_REGISTERS else CHUNK
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
        num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
    )
    return out


def advance_beams(
    values: Tensor,
    indices: Tensor,
    codes: int,
    children: TrieLevel | None,
    nodes: Tensor | None,
    in_sid_order: bool,
    failed: Tensor | None = None,
) -> AdvancedBeams:
    """As `reference.advance_beams`; contiguous tensors, k at most 1024.

    Raises:
        ValueError: a wrong type, shape or layout.
    """
    batch, k = values.shape
    if k > MAX_K:
        raise ValueError(f"values: k = {k}, expected at most {MAX_K}")
    check("values", values, (batch, k), torch.float32)
    check("indices", indices, (batch, k))
    beams = 0 if nodes is None else nodes.shape[1]
    check_children(children, nodes, batch, beams)
    if failed is not None:
        check("failed", failed, (batch,))
    out_nodes, out_codes, out_parents = (torch.empty_like(indices) for _ in range(3))
    scores = torch.empty_like(values)
    if not k:
        none = indices.new_zeros(batch)
        return AdvancedBeams(out_nodes, out_codes, scores, out_parents, none, none if failed is None else failed)
    counts, out_failed = indices.new_empty(batch), indices.new_empty(batch)
    if batch:
        advance_kernel[(batch, triton.cdiv(k, BEAMS))](
            values,
            indices,
            None if children is None else children.first_child,
            None if children is None else children.codes,
            nodes,
            failed,
            out_nodes,
            out_codes,
            scores,
            out_parents,
            counts,
            out_failed,
            k,
            beams,
            CODES=codes,
            K_PADDED=triton.next_power_of_2(k),
            BEAMS=BEAMS,
            CONSTRAINED=children is not None,
            IN_SID_ORDER=in_sid_order,
            FAILED_BEFORE=failed is not None,
            num_warps=4,
        )
    return AdvancedBeams(out_nodes, out_codes, scores, out_parents, counts, out_failed)
