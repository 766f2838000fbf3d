"""Router and sort against their references: in Triton's interpreter, on the GPU where there is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from loka_serve.kernels.moe import reference
from tests.kernels.beam_attention.compiled import MachineCode, machine_code
from tests.kernels.devices import DEVICE, needs_triton
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
    from loka_serve.kernels.moe.routing import DESCRIBED, TILINGS
    from loka_serve.kernels.moe.triton_router import router_kernel, router_sort_kernel, sort_kernel

    integers = ("selected", "rank", "count", "position", "row_token", "expert_of_block", "block_count")
    types = {
        **{f"{name}_ptr": "*i32" for name in integers},
        **dict.fromkeys(("bias_ptr", "slot_weight_ptr"), "*fp32"),
        **dict.fromkeys(("x_ptr", "weight_ptr"), "*bf16"),
        **dict.fromkeys(("tokens", "chunks", "blocks", "end_k", "top_k"), "i32"),
    }
    preset = {"EXPERTS": 53, "TOP_K": 3, "SLOTS": 4, "SLOTS_PADDED": 4, "COLUMNS": 64, "K": 1408, "BLOCK_K": 128}
    most = {**preset, "EXPERTS": 255, "TOP_K": 8, "SLOTS": 9, "SLOTS_PADDED": 16, "COLUMNS": 256, "BLOCK_K": 32}
    one = {**preset, "TOP_K": 1, "SLOTS": 1, "SLOTS_PADDED": 1}
    tilings = [tiling for _, tiling in TILINGS]
    chunks = [{"CHUNK": tiling.chunk, "STAGES": tiling.stages} for tiling in tilings]
    routers = [preset | chunk for chunk in chunks]
    codes = check_code(router_kernel, types, [*routers, one | chunks[0], most | chunks[0]])
    # The code is what a launch waits for; as much again and the kernel has been unrolled.
    for code, limit in zip(codes, (1300, 1800, 2900), strict=False):
        assert sum(code.instructions.values()) < limit
    assert all(code.instructions["HMMA"] or code.instructions["HGMMA"] for code in codes)
    for dtype in ("*fp32", "*bf16"):
        check_code(router_kernel, types | {"x_ptr": dtype}, [routers[0] | {"K": 0}])
    check_code(router_sort_kernel, types, [routers[0] | {"BLOCK_M": 64, "DESCRIBED": DESCRIBED}])
    sorts = [
        preset | chunk | {"PAIRS": 4 * chunk["CHUNK"], "READ": read, "BLOCK_M": block_m, "DESCRIBED": DESCRIBED}
        for chunk, read, block_m in zip(chunks, (16, 128, 128), (64, 128, 128), strict=True)
    ]
    check_code(sort_kernel, types, sorts)


def check_code(kernel: Any, types: dict[str, str], variants: list[dict[str, int]]) -> list[MachineCode]:
    """Machine code of the variants, which fits and keeps nothing in local memory."""
    codes = machine_code(
        kernel,
        [
            {
                "signature": {name: types[name] for name in kernel.arg_names if not name.isupper()},
                "constants": {name: variant[name] for name in kernel.arg_names if name.isupper()},
                "options": {"num_warps": 8},
            }
            for variant in variants
        ],
    )
    for variant, code in zip(variants, codes, strict=True):
        assert code.stack == 0 and code.shared_memory <= 227 << 10, variant
    return codes
