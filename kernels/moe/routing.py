"""Router and sort by expert: one or two short kernels whose launches depend on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .reference import SortedRows, block_bound
from .triton_router import router_kernel, router_sort_kernel, sort_kernel

MAX_EXPERTS = 256
DESCRIBED = 16  # blocks whose experts and padding one program of the sort writes


@dataclass(frozen=True)
class Router:
    """A router that is yet to be applied: logits = x W^T, which the kernel that selects computes on the way.

    Attributes:
        x: contiguous bfloat16 [tokens, d_model].
        weight: contiguous bfloat16 [experts, d_model].
    """

    x: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Routing:
    """What the router found.

    Attributes:
        selected, weights: int32 and float32 [tokens, slots].
        ranks: int32 [tokens, slots], how many tokens before, of the same chunk, selected the same expert.
        counts: int32 [chunks, columns], how often each expert was selected in each chunk.
        chunk: tokens of a chunk; the last one may have fewer.
    """

    selected: Tensor
    weights: Tensor
    ranks: Tensor
    counts: Tensor
    chunk: int


@dataclass(frozen=True)
class RouterTiling:
    """Tokens of a program, which are a chunk of the sort; warps and pipeline stages of the product."""

    chunk: int
    warps: int = 4
    stages: int = 6


# For at most so many tokens. A program reads the whole weight, so the chunk grows once the device's 132 multiprocessors
# have one each. Four warps beat eight at every chunk measured on an H200.
TILINGS: tuple[tuple[float, RouterTiling], ...] = (
    (132 * 16, RouterTiling(16)),
    (132 * 32, RouterTiling(32)),
    (float("inf"), RouterTiling(64, stages=4)),
)
JOINT_TOKENS = 16  # at most so many are routed and sorted by one program


def choose_tiling(tokens: int) -> RouterTiling:
    """The table's entry; known from shapes, fixed at capture."""
    return next(tiling for limit, tiling in TILINGS if tokens <= limit)


def route(
    logits: Tensor | Router,
    selection_bias: Tensor,
    top_k: int,
    shared_experts: int = 0,
    tiling: RouterTiling | None = None,
) -> Routing:
    """As `reference.route`, with what `sort_rows` needs.

    Args:
        logits: contiguous float32 or bfloat16 [tokens, experts], or what they are the product of.
        selection_bias: float [experts].
    """
    source, tokens, experts = _check(logits, selection_bias, top_k, shared_experts)
    tiling = tiling or choose_tiling(tokens)
    slots, columns, chunks = top_k + shared_experts, _columns(experts + shared_experts), -(-tokens // tiling.chunk)
    selected = source.new_empty(tokens, slots, dtype=torch.int32)
    weights = source.new_empty(tokens, slots, dtype=torch.float32)
    ranks = torch.empty_like(selected)
    counts = source.new_empty(chunks, columns, dtype=torch.int32)
    if tokens:
        k = logits.weight.shape[1] if isinstance(logits, Router) else 0
        router_kernel[(chunks,)](
            source,
            logits.weight if isinstance(logits, Router) else source,
            selection_bias,
            selected,
            weights,
            ranks,
            counts,
            tokens,
            k,
            top_k,
            K=k,
            EXPERTS=experts,
            TOP_K=top_k,
            SLOTS=slots,
            SLOTS_PADDED=triton.next_power_of_2(slots),
            COLUMNS=columns,
            CHUNK=tiling.chunk,
            BLOCK_K=_block_k(columns),
            STAGES=tiling.stages,
            num_warps=tiling.warps,
        )
    return Routing(selected, weights, ranks, counts, tiling.chunk)


def sort_rows(routing: Routing, experts: int, block_m: int) -> SortedRows:
    """As `reference.sort_rows`; `experts` counts the shared ones. Rows of unneeded blocks are left undefined."""
    selected = routing.selected
    tokens, slots = selected.shape
    chunks, columns = routing.counts.shape
    if columns != _columns(experts):
        raise ValueError(f"experts = {experts}, but the routing was counted in {columns} columns")
    rows, blocks = _allocate(selected, experts, block_m)
    if tokens:
        sort_kernel[(chunks + triton.cdiv(blocks, DESCRIBED),)](
            selected,
            routing.ranks,
            routing.counts,
            rows.tokens,
            rows.expert_of_block,
            rows.block_count,
            rows.positions,
            tokens,
            chunks,
            blocks,
            SLOTS=slots,
            PAIRS=triton.next_power_of_2(routing.chunk * slots),
            COLUMNS=columns,
            BLOCK_M=block_m,
            CHUNK=routing.chunk,
            READ=min(max(16, triton.next_power_of_2(chunks)), 8192 // columns),
            DESCRIBED=DESCRIBED,
            num_warps=8,
        )
    return rows


def route_and_sort(
    logits: Tensor | Router,
    selection_bias: Tensor,
    top_k: int,
    shared_experts: int,
    block_m: int,
    joint_tokens: int = JOINT_TOKENS,
) -> tuple[Tensor, SortedRows]:
    """(slot weights, rows) of `route` and `sort_rows`; up to `joint_tokens` tokens in one launch, given a `Router`."""
    source, tokens, experts = _check(logits, selection_bias, top_k, shared_experts)
    if not isinstance(logits, Router) or not 0 < tokens <= joint_tokens:
        routing = route(logits, selection_bias, top_k, shared_experts)
        return routing.weights, sort_rows(routing, experts + shared_experts, block_m)
    slots, columns, k = top_k + shared_experts, _columns(experts + shared_experts), logits.weight.shape[1]
    selected = source.new_empty(tokens, slots, dtype=torch.int32)
    weights = source.new_empty(tokens, slots, dtype=torch.float32)
    rows, blocks = _allocate(selected, experts + shared_experts, block_m)
    router_sort_kernel[(1,)](
        source,
        logits.weight,
        selection_bias,
        selected,
        weights,
        rows.tokens,
        rows.expert_of_block,
        rows.block_count,
        rows.positions,
        tokens,
        blocks,
        k,
        top_k,
        K=k,
        EXPERTS=experts,
        TOP_K=top_k,
        SLOTS=slots,
        SLOTS_PADDED=triton.next_power_of_2(slots),
        COLUMNS=columns,
        BLOCK_M=block_m,
        CHUNK=max(16, triton.next_power_of_2(tokens)),
        BLOCK_K=_block_k(columns),
        STAGES=6 if tokens <= 32 else 3,
        DESCRIBED=DESCRIBED,
        num_warps=4,
    )
    return weights, rows


def _check(logits: Tensor | Router, selection_bias: Tensor, top_k: int, shared_experts: int) -> tuple[Tensor, int, int]:
    """(logits or x, tokens, experts) of arguments that fit together.

    Raises:
        ValueError: names the argument that does not.
    """
    if isinstance(logits, Router):
        source, weight = logits.x, logits.weight
        if source.dtype != torch.bfloat16 or not source.is_contiguous():
            raise ValueError(f"router.x: expected contiguous bfloat16 [tokens, d_model], got {source.dtype}")
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or weight.shape[1] != source.shape[1]:
            raise ValueError(
                f"router.weight: expected contiguous bfloat16 [experts, {source.shape[1]}], "
                f"got {weight.dtype} {list(weight.shape)}"
            )
        tokens, experts = len(source), len(weight)
    else:
        source = logits
        tokens, experts = logits.shape
        if logits.dtype not in (torch.float32, torch.bfloat16) or not logits.is_contiguous():
            raise ValueError(f"logits: expected contiguous float32 or bfloat16 [tokens, experts], got {logits.dtype}")
    if selection_bias.shape != (experts,):
        raise ValueError(f"selection_bias: expected [{experts}], got {list(selection_bias.shape)}")
    if not 0 < top_k <= experts or experts + shared_experts > MAX_EXPERTS:
        raise ValueError(f"top_k = {top_k} of {experts} + {shared_experts} experts: at most {MAX_EXPERTS} experts")
    return source, tokens, experts


def _allocate(selected: Tensor, experts: int, block_m: int) -> tuple[SortedRows, int]:
    """Rows for (token, slot) pairs [tokens, slots], and the number of their blocks."""
    tokens, slots = selected.shape
    blocks = block_bound(tokens, slots, experts, block_m)
    row_tokens, owner = selected.new_empty(blocks * block_m), selected.new_empty(blocks)
    block_count = selected.new_empty(1) if tokens else selected.new_zeros(1)
    return SortedRows(row_tokens, owner, block_count, torch.empty_like(selected), block_m), blocks


def _columns(experts: int) -> int:
    return max(16, triton.next_power_of_2(experts))


def _block_k(columns: int) -> int:
    """16 KiB of the router's weight a stage."""
    return max(32, min(128, 8192 // columns))
