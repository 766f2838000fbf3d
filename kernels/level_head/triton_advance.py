"""The beams that top-k chose in their places: one small kernel, a program for each 32 of them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check, check_children, check_prefix
from .reference import AdvancedBeams, TrieLevel

MAX_K = 1024
BEAMS = 32  # placed by one program


@triton.jit
def advance_kernel(
    values_ptr,
    indices_ptr,
    first_child_ptr,
    codes_ptr,
    nodes_ptr,
    prefix_ptr,
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
    PARENTS_PADDED: tl.constexpr,  # power of two, at least `beams`; only read where compact
    CONSTRAINED: tl.constexpr,
    COMPACT: tl.constexpr,
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
    if COMPACT:
        beam = tl.arange(0, PARENTS_PADDED)
        begins = prefix_ptr + request * (beams + 1)
        ends = tl.load(begins + 1 + beam, mask=beam < beams, other=2**31 - 1)
        # Beams without candidates end where they begin, so they are passed by too.
        parent = tl.where(live, tl.sum((ends[None, :] <= index[:, None]).to(tl.int32), axis=1), 0)
        above = tl.load(nodes_ptr + request * beams + parent, mask=live, other=0)
        child = index - tl.load(begins + parent, mask=live, other=0)
        node = tl.load(first_child_ptr + above, mask=live, other=0) + child
        code = tl.load(codes_ptr + node, mask=live, other=0)
    else:
        parent = index // CODES
        code = index - parent * CODES
        node = code
        if CONSTRAINED:
            above = tl.load(nodes_ptr + request * beams + parent, mask=live, other=0)
            first = tl.load(first_child_ptr + above, mask=live, other=0)
            last = tl.load(first_child_ptr + above + 1, mask=live, other=0)
            # Search in WAYS parts at a time, since what counts is how many loads wait for each other. The child is the
            # last one whose code is not above the beam's, and it is in first..last - 1.
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
    """As `reference.advance_beams`; contiguous tensors, k and, with `prefix`, beams at most 1024.

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
    if prefix is not None:
        check_prefix(prefix, children, batch, beams)
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
            prefix,
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
            PARENTS_PADDED=1 if prefix is None else triton.next_power_of_2(beams),
            CONSTRAINED=children is not None,
            COMPACT=prefix is not None,
            IN_SID_ORDER=in_sid_order,
            FAILED_BEFORE=failed is not None,
            num_warps=4,
        )
    return AdvancedBeams(out_nodes, out_codes, scores, out_parents, counts, out_failed)
