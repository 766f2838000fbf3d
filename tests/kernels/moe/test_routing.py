"""Router and sort against their references: in Triton's interpreter, on the GPU where there is one."""

from __future__ import annotations

import math

import pytest
import torch

from loka_serve.kernels.moe import reference
from tests.kernels.devices import DEVICE, compile_for_hopper, needs_triton
from tests.kernels.moe.cases import LOADS, make_logits

pytestmark = needs_triton


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 5, 2), (7, 5, 3), (40, 53, 3), (130, 8, 8), (66, 4, 1)])
@pytest.mark.parametrize("shared_experts", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router(tokens: int, experts: int, top_k: int, shared_experts: int, dtype: torch.dtype) -> None:
    from loka_serve.kernels.moe.routing import route

    # Quarters: many exact ties, and no score so near another that another library's exp() would change the order.
    logits = torch.randint(-8, 9, (tokens, experts), generator=torch.Generator().manual_seed(tokens)) / 4
    logits = logits.to(DEVICE, dtype)
    bias = (torch.arange(experts, device=DEVICE) % 3).float() * 0.3
    routing = route(logits, bias, top_k, shared_experts)
    selected, weights = reference.route(logits, bias, top_k, shared_experts)
    assert torch.equal(routing.selected, selected)
    # exp() and the order of the sum differ: a few units in the last place of float32.
    torch.testing.assert_close(routing.weights, weights, rtol=1e-6, atol=0)
    counts = torch.bincount(selected.flatten(), minlength=routing.counts.shape[1])
    assert torch.equal(routing.counts.sum(0), counts)


def test_router_keeps_a_poisoned_token_to_itself() -> None:
    from loka_serve.kernels.moe.routing import route

    logits = make_logits(5, 6, "random", DEVICE)
    logits[1] = math.nan
    logits[2, 4] = math.nan
    logits[3, 5] = math.inf
    bias = torch.zeros(6, device=DEVICE)
    routing = route(logits, bias, 2)
    selected, weights = reference.route(logits, bias, 2)
    assert torch.equal(routing.selected, selected)
    torch.testing.assert_close(routing.weights, weights, rtol=1e-6, atol=0, equal_nan=True)
    assert routing.weights[[0, 3, 4]].isfinite().all() and routing.weights[[1, 2]].isnan().all()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 5, 2), (7, 5, 1), (40, 5, 2), (200, 53, 3)])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("block_m", [16, 64])
def test_sort(tokens: int, experts: int, top_k: int, load: str, block_m: int) -> None:
    check_sort(tokens, experts, top_k, load, block_m)


def test_sort_adds_up_many_chunks() -> None:
    check_sort(4200, 6, 2, "skewed", 64)  # 66 chunks of 64 tokens: more than one load of counts


def check_sort(tokens: int, experts: int, top_k: int, load: str, block_m: int) -> None:
    from loka_serve.kernels.moe.routing import route, sort_rows

    routing = route(make_logits(tokens, experts, load, DEVICE), torch.zeros(experts, device=DEVICE), top_k, 1)
    rows = sort_rows(routing, experts + 1, block_m)
    expected = reference.sort_rows(routing.selected, experts + 1, block_m)
    assert torch.equal(rows.expert_of_block, expected.expert_of_block)
    assert torch.equal(rows.positions, expected.positions)
    assert torch.equal(rows.block_count, expected.block_count)
    needed = int((expected.expert_of_block >= 0).sum()) * block_m
    assert torch.equal(rows.tokens[:needed], expected.tokens[:needed])


def test_no_tokens_and_wrong_arguments() -> None:
    from loka_serve.kernels.moe.routing import route, sort_rows

    bias = torch.zeros(5, device=DEVICE)
    routing = route(torch.zeros(0, 5, device=DEVICE), bias, 2)
    rows = sort_rows(routing, 5, 16)
    assert rows.tokens.shape == rows.expert_of_block.shape == (0,)
    with pytest.raises(ValueError, match="logits: expected contiguous float32 or bfloat16"):
        route(torch.zeros(2, 5, device=DEVICE, dtype=torch.float64), bias, 2)
    with pytest.raises(ValueError, match="selection_bias"):
        route(torch.zeros(2, 4, device=DEVICE), bias, 2)
    with pytest.raises(ValueError, match="top_k = 6 of 5"):
        route(torch.zeros(2, 5, device=DEVICE), bias, 6)
    with pytest.raises(ValueError, match="experts = 40"):
        sort_rows(routing, 40, 16)


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.moe.routing import CHUNK, router_kernel, sort_kernel

    integers = dict.fromkeys(
        ("selected_ptr", "count_ptr", "position_ptr", "row_token_ptr", "expert_of_block_ptr", "block_count_ptr"), "*i32"
    )
    floats = dict.fromkeys(("logits_ptr", "bias_ptr", "weight_ptr"), "*fp32")
    bf16 = dict.fromkeys(("output_ptr", "shared_ptr", "residual_ptr", "out_ptr"), "*bf16")
    signature = {**integers, **floats, **bf16, **dict.fromkeys(("tokens", "chunks", "blocks"), "i32")}
    sizes = {"SLOTS": 4, "COLUMNS": 64, "CHUNK": CHUNK}
    router = {**sizes, "EXPERTS": 53, "TOP_K": 3, "SLOTS_PADDED": 4}
    compile_for_hopper(router_kernel, signature, [router, {**router, "logits_ptr": "*bf16"}], num_warps=8)
    compile_for_hopper(sort_kernel, signature, [{**sizes, "BLOCK_M": block_m} for block_m in (64, 128)], num_warps=8)
