"""Router and sort by expert: two small kernels whose launches depend on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import SortedRows, block_bound

CHUNK = 64  # tokens of one program of the router and of the sort
MAX_EXPERTS = 256


@dataclass(frozen=True)
class Routing:
    """What the router found.

    Attributes:
        selected, weights: int32 and float32 [tokens, slots].
        counts: int32 [chunks, columns], how often each expert was selected in each chunk of `CHUNK` tokens.
    """

    selected: Tensor
    weights: Tensor
    counts: Tensor


@triton.jit(do_not_specialize=["tokens"])
def router_kernel(
    logits_ptr,
    bias_ptr,
    selected_ptr,
    weight_ptr,
    count_ptr,
    tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K, then the shared experts
    SLOTS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two, at least all experts
    CHUNK: tl.constexpr,
):
    LAST: tl.constexpr = -(2**63)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, COLUMNS)
    inside = token < tokens
    at = token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=inside[:, None] & (expert < EXPERTS)[None, :], other=0.0)
    score = tl.sigmoid(logits.to(tl.float32))
    biased = score + tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)[None, :]
    # As integers: a float's order in the upper half (NaN above all, as torch.sort has it), lower experts first below.
    bits = biased.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(biased == biased, key, 0x7FFFFFFF)
    rank = (key.to(tl.int64) << 32) | (COLUMNS - 1 - expert).to(tl.int64)[None, :]
    rank = tl.where((expert < EXPERTS)[None, :], rank, LAST)

    slot = tl.arange(0, SLOTS_PADDED)[None, :]
    selected = tl.zeros([CHUNK, SLOTS_PADDED], tl.int32) + (EXPERTS - TOP_K + slot)  # right for the shared experts
    weight = tl.zeros([CHUNK, SLOTS_PADDED], tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    members = tl.zeros([CHUNK, COLUMNS], tl.int32) + ((expert >= EXPERTS) & (expert < EXPERTS + SLOTS - TOP_K))[None, :]
    for k in tl.static_range(TOP_K):
        best = COLUMNS - 1 - (tl.max(rank, axis=1) & 0xFFFFFFFF).to(tl.int32)
        chosen = expert[None, :] == best[:, None]
        chosen_score = tl.sum(tl.where(chosen, score, 0.0), axis=1)
        total += chosen_score
        selected = tl.where(slot == k, best[:, None], selected)
        weight = tl.where(slot == k, chosen_score[:, None], weight)
        members += chosen
        rank = tl.where(chosen, LAST, rank)
    weight = tl.where(slot < TOP_K, weight / total[:, None], 1.0)
    at = token.to(tl.int64)[:, None] * SLOTS + slot
    mask = inside[:, None] & (slot < SLOTS)
    tl.store(selected_ptr + at, selected, mask=mask)
    tl.store(weight_ptr + at, weight, mask=mask)
    tl.store(count_ptr + tl.program_id(0) * COLUMNS + expert, tl.sum(tl.where(inside[:, None], members, 0), axis=0))


@triton.jit(do_not_specialize=["tokens", "chunks", "blocks"])
def sort_kernel(
    selected_ptr,
    count_ptr,
    row_token_ptr,
    expert_of_block_ptr,
    block_count_ptr,
    position_ptr,
    tokens,
    chunks,
    blocks,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # Every program adds up the counts of all chunks for itself, which is cheaper than one more launch.
    chunk = tl.program_id(0)
    expert = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    before = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, chunks, 64):
        other = start + tl.arange(0, 64)
        at = other[:, None] * COLUMNS + expert[None, :]
        counts = tl.load(count_ptr + at, mask=(other < chunks)[:, None], other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), axis=0)
    expert_blocks = (total + BLOCK_M - 1) // BLOCK_M
    block_end = tl.cumsum(expert_blocks, axis=0)
    start_row = (block_end - expert_blocks) * BLOCK_M

    if chunk == chunks:  # the last program has no tokens: it marks padding and names each block's expert
        padding = (start_row + total)[:, None] + tl.arange(0, BLOCK_M)[None, :]
        tl.store(row_token_ptr + padding, -1, mask=padding < (block_end * BLOCK_M)[:, None])
        tl.store(block_count_ptr, tl.sum(expert_blocks, axis=0))
        for start in range(0, blocks, 64):
            block = start + tl.arange(0, 64)
            owner = tl.sum((block_end[None, :] <= block[:, None]).to(tl.int32), axis=1)
            owner = tl.where(owner < COLUMNS, owner, -1)
            tl.store(expert_of_block_ptr + block, owner, mask=block < blocks)
    else:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < tokens
        slot_ptrs = selected_ptr + token.to(tl.int64) * SLOTS
        members = tl.zeros([CHUNK, COLUMNS], tl.int32)
        for slot in tl.static_range(SLOTS):
            selected = tl.load(slot_ptrs + slot, mask=inside, other=-1)
            members += selected[:, None] == expert[None, :]
        row = (start_row + before)[None, :] + tl.cumsum(members, axis=0) - members
        for slot in tl.static_range(SLOTS):
            selected = tl.load(slot_ptrs + slot, mask=inside, other=-1)
            position = tl.sum(tl.where(selected[:, None] == expert[None, :], row, 0), axis=1)
            tl.store(position_ptr + token.to(tl.int64) * SLOTS + slot, position, mask=inside)
            tl.store(row_token_ptr + position, token, mask=inside)


def route(logits: Tensor, selection_bias: Tensor, top_k: int, shared_experts: int = 0) -> Routing:
    """As `reference.route`, with the counts that `sort_rows` needs; logits contiguous float32 or bfloat16."""
    tokens, experts = logits.shape
    if logits.dtype not in (torch.float32, torch.bfloat16) or not logits.is_contiguous():
        raise ValueError(f"logits: expected contiguous float32 or bfloat16 [tokens, experts], got {logits.dtype}")
    if selection_bias.shape != (experts,):
        raise ValueError(f"selection_bias: expected [{experts}], got {list(selection_bias.shape)}")
    if not 0 < top_k <= experts or experts + shared_experts > MAX_EXPERTS:
        raise ValueError(f"top_k = {top_k} of {experts} + {shared_experts} experts: at most {MAX_EXPERTS} experts")
    slots, columns, chunks = top_k + shared_experts, _columns(experts + shared_experts), triton.cdiv(tokens, CHUNK)
    selected = logits.new_empty(tokens, slots, dtype=torch.int32)
    weights = logits.new_empty(tokens, slots, dtype=torch.float32)
    counts = logits.new_empty(chunks, columns, dtype=torch.int32)
    if tokens:
        router_kernel[(chunks,)](
            logits,
            selection_bias,
            selected,
            weights,
            counts,
            tokens,
            EXPERTS=experts,
            TOP_K=top_k,
            SLOTS=slots,
            SLOTS_PADDED=triton.next_power_of_2(slots),
            COLUMNS=columns,
            CHUNK=CHUNK,
            num_warps=8,
        )
    return Routing(selected, weights, counts)


def sort_rows(routing: Routing, experts: int, block_m: int) -> SortedRows:
    """As `reference.sort_rows`; `experts` counts the shared ones. Rows of unneeded blocks are left undefined."""
    selected = routing.selected
    tokens, slots = selected.shape
    chunks, columns = routing.counts.shape
    if columns != _columns(experts):
        raise ValueError(f"experts = {experts}, but the routing was counted in {columns} columns")
    blocks = block_bound(tokens, slots, experts, block_m)
    row_tokens = selected.new_empty(blocks * block_m)
    expert_of_block = selected.new_empty(blocks)
    block_count = selected.new_zeros(1) if not tokens else selected.new_empty(1)
    positions = torch.empty_like(selected)
    if tokens:
        sort_kernel[(chunks + 1,)](
            selected,
            routing.counts,
            row_tokens,
            expert_of_block,
            block_count,
            positions,
            tokens,
            chunks,
            blocks,
            SLOTS=slots,
            COLUMNS=columns,
            BLOCK_M=block_m,
            CHUNK=CHUNK,
            num_warps=8,
        )
    return SortedRows(row_tokens, expert_of_block, block_count, positions, block_m)


def _columns(experts: int) -> int:
    return max(16, triton.next_power_of_2(experts))
