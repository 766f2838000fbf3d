"""The router that multiplies by itself, with the sort after it or within: in Triton's interpreter or on the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.moe import reference
from loka_serve.kernels.moe.reference import SortedRows
from tests.kernels.devices import DEVICE, needs_triton
from tests.kernels.moe.cases import make_rows

pytestmark = needs_triton

# (tokens, d_model, experts, top_k): one program and many, K with and without a rest, columns up to the most.
SHAPES = [
    (1, 64, 4, 1),
    (7, 200, 5, 5),
    (16, 128, 53, 3),
    (17, 96, 53, 8),
    (40, 130, 64, 2),
    (130, 128, 9, 4),
    (300, 64, 16, 3),
    (12, 72, 255, 6),
]


def exact_inputs(tokens: int, d_model: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights and bias whose logits are few quarters, exact in any order of the sum: many ties."""
    generator = torch.Generator().manual_seed(tokens + experts)
    x = torch.randint(-6, 7, (tokens, d_model), generator=generator) / 4
    weight = torch.zeros(experts, d_model)
    for _ in range(2):
        columns = torch.randint(0, d_model, (experts,), generator=generator)
        weight[torch.arange(experts), columns] += 1
    weight[experts // 2] = weight[0]
    bias = (torch.arange(experts) % 3).float() * 0.3
    return x.bfloat16().to(DEVICE), weight.bfloat16().to(DEVICE), bias.to(DEVICE)


def check_rows(rows: SortedRows, expected: SortedRows) -> None:
    assert torch.equal(rows.expert_of_block, expected.expert_of_block)
    assert torch.equal(rows.positions, expected.positions)
    assert torch.equal(rows.block_count, expected.block_count)
    needed = int((expected.expert_of_block >= 0).sum()) * expected.block_m
    assert torch.equal(rows.tokens[:needed], expected.tokens[:needed])


@pytest.mark.parametrize(("tokens", "d_model", "experts", "top_k"), SHAPES)
@pytest.mark.parametrize("shared_experts", [0, 1])
def test_equals_reference(tokens: int, d_model: int, experts: int, top_k: int, shared_experts: int) -> None:
    from loka_serve.kernels.moe.routing import Router, RouterTiling, route, route_and_sort, sort_rows

    x, weight, bias = exact_inputs(tokens, d_model, experts)
    logits = x.float() @ weight.float().T
    selected, weights = reference.route(logits, bias, top_k, shared_experts)
    expected = reference.sort_rows(selected, experts + shared_experts, 16)
    for chunk in (16, 64):
        routing = route(Router(x, weight), bias, top_k, shared_experts, RouterTiling(chunk, stages=3))
        assert torch.equal(routing.selected, selected)
        # exp() and the order of the sum differ: a few units in the last place of float32.
        torch.testing.assert_close(routing.weights, weights, rtol=1e-6, atol=0)
        check_rows(sort_rows(routing, experts + shared_experts, 16), expected)
    for joint_tokens in (0, 64):
        slot_weights, rows = route_and_sort(
            Router(x, weight), bias, top_k, shared_experts, 16, joint_tokens=joint_tokens
        )
        torch.testing.assert_close(slot_weights, weights, rtol=1e-6, atol=0)
        check_rows(rows, expected)


@pytest.mark.parametrize("joint_tokens", [0, 64])
def test_dense_inputs(joint_tokens: int) -> None:
    from loka_serve.kernels.moe.routing import Router, route_and_sort

    x = make_rows(33, 328, DEVICE)
    weight = (make_rows(21, 328, DEVICE, seed=1).float() / 60).bfloat16()
    logits = x.float() @ weight.float().T
    bias = torch.zeros(21, device=DEVICE)
    best = torch.sigmoid(logits).sort(dim=1, descending=True).values
    assert (best[:, :3] - best[:, 1:4]).min() > 1e-5  # no order hangs on that of a sum
    selected, weights = reference.route(logits, bias, 3, 1)
    slot_weights, rows = route_and_sort(Router(x, weight), bias, 3, 1, 64, joint_tokens=joint_tokens)
    torch.testing.assert_close(slot_weights, weights, rtol=1e-5, atol=0)
    check_rows(rows, reference.sort_rows(selected, 22, 64))


@pytest.mark.parametrize("joint_tokens", [0, 64])
def test_a_poisoned_token_stays_alone(joint_tokens: int) -> None:
    from loka_serve.kernels.moe.routing import Router, route_and_sort

    x, weight, bias = exact_inputs(20, 128, 9)
    clean_weights, _ = route_and_sort(Router(x, weight), bias, 3, 1, 16, joint_tokens=joint_tokens)
    x[7, 3] = math.nan
    selected, _ = reference.route(x.float() @ weight.float().T, bias, 3, 1)
    assert selected[7].tolist() == [0, 1, 2, 9]
    slot_weights, rows = route_and_sort(Router(x, weight), bias, 3, 1, 16, joint_tokens=joint_tokens)
    check_rows(rows, reference.sort_rows(selected, 10, 16))
    others = torch.arange(20, device=DEVICE) != 7
    assert slot_weights[7, :3].isnan().all() and torch.equal(slot_weights[others], clean_weights[others])


def test_a_token_is_routed_alike_in_every_batch() -> None:
    from loka_serve.kernels.moe.routing import Router, route

    x = make_rows(70, 256, DEVICE)
    weight = make_rows(53, 256, DEVICE, seed=1) / 16
    bias = torch.linspace(0, 0.1, 53, device=DEVICE)
    whole = route(Router(x, weight), bias, 3, 1)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0)).to(DEVICE)[:21]
    few = route(Router(x[order], weight), bias, 3, 1)
    assert torch.equal(few.selected, whole.selected[order]) and torch.equal(few.weights, whole.weights[order])


def test_no_tokens_and_wrong_arguments() -> None:
    from loka_serve.kernels.moe.routing import Router, route, route_and_sort

    weight = torch.zeros(5, 64, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.zeros(5, device=DEVICE)
    slot_weights, rows = route_and_sort(Router(weight[:0], weight), bias, 2, 1, 16)
    assert slot_weights.shape == (0, 3) and rows.tokens.shape == (0,) and rows.block_count.tolist() == [0]
    with pytest.raises(ValueError, match="router.x: expected contiguous bfloat16"):
        route(Router(weight.float(), weight), bias, 2)
    with pytest.raises(ValueError, match=r"router.weight: expected contiguous bfloat16 \[experts, 32\]"):
        route(Router(weight[:, :32].contiguous(), weight), bias, 2)
    with pytest.raises(ValueError, match="selection_bias"):
        route(Router(weight, weight), bias[:4], 2)
