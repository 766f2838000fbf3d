"""Router kernels: logits, selection and counts in one launch, the sort in a second one, or all of it in one program.

They run between GEMMs whose weights have swept the caches, so that a launch begins by fetching its instructions from
device memory: unrolled code costs more than the arithmetic. Hence loops whose bounds are no constants.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(
    x_ptr,
    weight_ptr,
    token,
    tokens,
    end_k,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x W^T of a tile of tokens, float32 [tile, COLUMNS]; rows and columns beyond the last repeat it."""
    lane = tl.arange(0, BLOCK_K)
    source = tl.minimum(token, tokens - 1).to(tl.int64)
    expert = tl.minimum(tl.arange(0, COLUMNS), EXPERTS - 1)
    x_ptrs = x_ptr + source[:, None] * K + lane[None, :]
    w_ptrs = weight_ptr + expert[:, None] * K + lane[None, :]
    total = tl.zeros([token.shape[0], COLUMNS], tl.float32)
    for k in tl.range(0, end_k, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k)
        else:
            inside = (lane < K - k)[None, :]
            x = tl.load(x_ptrs + k, mask=inside, other=0.0)
            w = tl.load(w_ptrs + k, mask=inside, other=0.0)
        total = tl.dot(x, w.T, total)
    return total


@triton.jit
def _select(
    logits,
    bias_ptr,
    selected_ptr,
    weight_ptr,
    token,
    inside,
    top_k,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store experts and weights of a tile of tokens; which they are as [tile, SLOTS_PADDED] and [tile, COLUMNS]."""
    LAST: tl.constexpr = -(2**31)  # below every float's key
    # In full, though its rows are alike: a load settles the layout, here with each token's experts within one warp.
    expert = tl.zeros(logits.shape, tl.int32) + tl.arange(0, COLUMNS)[None, :]
    bias = tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    score = tl.sigmoid(logits)
    biased = score + bias
    # As integers in the order of the floats, NaN above all, as torch.sort has it.
    bits = biased.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(biased == biased, key, 0x7FFFFFFF)
    key = tl.where(expert < EXPERTS, key, LAST)
    slot = tl.arange(0, SLOTS_PADDED)[None, :]
    selected = tl.zeros([token.shape[0], SLOTS_PADDED], tl.int32)
    selected += tl.minimum(EXPERTS - TOP_K + slot, COLUMNS - 1)  # right for the shared experts
    for k in tl.range(top_k, num_stages=1):
        best = tl.max(key, axis=1)[:, None]
        best = tl.min(tl.where(key == best, expert, COLUMNS), axis=1)[:, None]  # of equals the first
        selected = tl.where(slot == k, best, selected)
        key = tl.where(expert == best, LAST, key)
    weight = tl.where(slot < TOP_K, tl.gather(score, selected, axis=1), 0.0)
    weight = tl.where(slot < TOP_K, weight / tl.sum(weight, axis=1)[:, None], 1.0)
    at = token.to(tl.int64)[:, None] * SLOTS + slot
    mask = inside[:, None] & (slot < SLOTS)
    tl.store(selected_ptr + at, selected, mask=mask)
    tl.store(weight_ptr + at, weight, mask=mask)
    members = (key == LAST) & (expert < EXPERTS + SLOTS - TOP_K) & inside[:, None]
    return selected, members.to(tl.int32)


@triton.jit
def _describe_blocks(
    block,
    blocks,
    block_end,
    row_end,
    row_token_ptr,
    expert_of_block_ptr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Name the experts of some blocks and mark their padding; block_end, row_end [COLUMNS] are where experts end."""
    expert = tl.arange(0, COLUMNS)[None, :]
    owner = tl.sum((block_end[None, :] <= block[:, None]).to(tl.int32), axis=1)
    end = tl.sum(tl.where(expert == owner[:, None], row_end[None, :], 0), axis=1)
    row = block[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    padding = (owner < COLUMNS)[:, None] & (row >= end[:, None]) & (block < blocks)[:, None]
    tl.store(row_token_ptr + row, tl.full(row.shape, -1, tl.int32), mask=padding)
    tl.store(expert_of_block_ptr + block, tl.where(owner < COLUMNS, owner, -1), mask=block < blocks)


@triton.jit(do_not_specialize=["tokens", "end_k", "top_k"])
def router_kernel(
    x_ptr,  # the logits where there is no weight
    weight_ptr,
    bias_ptr,
    selected_ptr,
    slot_weight_ptr,
    rank_ptr,
    count_ptr,
    tokens,
    end_k,  # K and TOP_K once more, see above
    top_k,
    K: tl.constexpr,  # 0: no weight
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K, then the shared experts
    SLOTS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two, at least all experts
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < tokens
    expert = tl.arange(0, COLUMNS)
    if K:
        logits = _logits(x_ptr, weight_ptr, token, tokens, end_k, K, EXPERTS, COLUMNS, BLOCK_K, STAGES)
    else:
        at = token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
        logits = tl.load(x_ptr + at, mask=inside[:, None] & (expert < EXPERTS)[None, :], other=0.0).to(tl.float32)
    selected, members = _select(
        logits,
        bias_ptr,
        selected_ptr,
        slot_weight_ptr,
        token,
        inside,
        top_k,
        EXPERTS,
        TOP_K,
        SLOTS,
        SLOTS_PADDED,
        COLUMNS,
    )
    slot = tl.arange(0, SLOTS_PADDED)[None, :]
    rank = tl.gather(tl.cumsum(members, axis=0) - members, selected, axis=1)
    at = token.to(tl.int64)[:, None] * SLOTS + slot
    tl.store(rank_ptr + at, rank, mask=inside[:, None] & (slot < SLOTS))
    tl.store(count_ptr + chunk * COLUMNS + expert, tl.sum(members, axis=0))


@triton.jit(do_not_specialize=["tokens", "chunks", "blocks"])
def sort_kernel(
    selected_ptr,
    rank_ptr,
    count_ptr,
    row_token_ptr,
    expert_of_block_ptr,
    block_count_ptr,
    position_ptr,
    tokens,
    chunks,
    blocks,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,  # power of two, at least CHUNK * SLOTS
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    READ: tl.constexpr,  # chunks whose counts are loaded at a time
    DESCRIBED: tl.constexpr,  # blocks of one of the programs after the chunks'
):
    chunk = tl.program_id(0)
    expert = tl.arange(0, COLUMNS)
    lane = tl.arange(0, PAIRS)
    token = chunk * CHUNK + lane // SLOTS
    inside = (lane < CHUNK * SLOTS) & (token < tokens)
    at = chunk.to(tl.int64) * (CHUNK * SLOTS) + lane
    selected = tl.load(selected_ptr + at, mask=inside, other=0)
    rank = tl.load(rank_ptr + at, mask=inside, other=0)
    # Every program adds up the counts of all chunks for itself, which is cheaper than one more launch: in the upper
    # half of a sum those before its own, in the lower half all of them.
    sums = tl.zeros([READ, COLUMNS], tl.int64)
    for start in tl.range(0, chunks, READ, num_stages=1):
        other = (start + tl.arange(0, READ))[:, None]
        counts = tl.load(count_ptr + other * COLUMNS + expert[None, :], mask=other < chunks, other=0).to(tl.int64)
        sums += counts + tl.where(other < chunk, counts << 32, 0)
    both = tl.sum(sums, axis=0)
    total = both.to(tl.int32)
    expert_blocks = (total + BLOCK_M - 1) // BLOCK_M
    block_end = tl.cumsum(expert_blocks, axis=0)
    start_row = (block_end - expert_blocks) * BLOCK_M
    if chunk < chunks:
        position = tl.gather(start_row + (both >> 32).to(tl.int32), selected, axis=0) + rank
        tl.store(position_ptr + at, position, mask=inside)
        tl.store(row_token_ptr + position, token, mask=inside)
    else:
        block = (chunk - chunks) * DESCRIBED + tl.arange(0, DESCRIBED)
        row_end = start_row + total
        _describe_blocks(block, blocks, block_end, row_end, row_token_ptr, expert_of_block_ptr, COLUMNS, BLOCK_M)
        tl.store(block_count_ptr, tl.sum(expert_blocks, axis=0))  # the same in every one of them


@triton.jit(do_not_specialize=["tokens", "blocks", "end_k", "top_k"])
def router_sort_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    selected_ptr,
    slot_weight_ptr,
    row_token_ptr,
    expert_of_block_ptr,
    block_count_ptr,
    position_ptr,
    tokens,  # at most CHUNK
    blocks,
    end_k,
    top_k,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    token = tl.arange(0, CHUNK)
    inside = token < tokens
    logits = _logits(x_ptr, weight_ptr, token, tokens, end_k, K, EXPERTS, COLUMNS, BLOCK_K, STAGES)
    selected, members = _select(
        logits,
        bias_ptr,
        selected_ptr,
        slot_weight_ptr,
        token,
        inside,
        top_k,
        EXPERTS,
        TOP_K,
        SLOTS,
        SLOTS_PADDED,
        COLUMNS,
    )
    total = tl.sum(members, axis=0)
    expert_blocks = (total + BLOCK_M - 1) // BLOCK_M
    block_end = tl.cumsum(expert_blocks, axis=0)
    start_row = (block_end - expert_blocks) * BLOCK_M
    slot = tl.arange(0, SLOTS_PADDED)[None, :]
    position = tl.gather(start_row[None, :] + tl.cumsum(members, axis=0) - members, selected, axis=1)
    mask = inside[:, None] & (slot < SLOTS)
    tl.store(position_ptr + token[:, None] * SLOTS + slot, position, mask=mask)
    tl.store(row_token_ptr + position, token[:, None] + tl.zeros_like(position), mask=mask)
    tl.store(block_count_ptr, tl.sum(expert_blocks, axis=0))
    row_end = start_row + total
    for start in tl.range(0, blocks, DESCRIBED, num_stages=1):
        block = start + tl.arange(0, DESCRIBED)
        _describe_blocks(block, blocks, block_end, row_end, row_token_ptr, expert_of_block_ptr, COLUMNS, BLOCK_M)
