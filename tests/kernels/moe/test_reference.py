"""The reference block against the model's own layer, and the sort against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from loka_serve.kernels.moe import reference
from loka_serve.kernels.moe.reference import ExpertWeights
from loka_serve.models.layers import SparseMoE
from tests.kernels.moe.cases import LOADS, make_logits, make_rows


@pytest.mark.parametrize("shared_experts", [0, 1])
def test_equals_the_models_layer(shared_experts: int) -> None:
    torch.manual_seed(0)
    layer = SparseMoE(d_model=96, experts=6, experts_per_token=2, width=64, shared_experts=shared_experts)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer = layer.bfloat16()
    x = make_rows(40, 96, "cpu")
    gate_up, down = layer.gate_up.weight, layer.down.weight
    assert gate_up is not None and down is not None
    if layer.shared is not None:  # a shared expert of the same width is one more expert
        gate_up = torch.cat([gate_up, layer.shared.gate_up.weight[None]])
        down = torch.cat([down, layer.shared.down.weight[None]])
    with torch.no_grad():
        logits = layer.router(x)
        out = reference.moe_block(x, None, logits, layer.selection_bias, ExpertWeights(gate_up, down), 2)
        expected = layer(x)
    # The layer also rounds gate, up and each partial sum to bfloat16: a few half-steps (2**-9) of the largest values.
    torch.testing.assert_close(out.float(), expected.float(), rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


def test_route_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0], [2.0, 2.0, 2.0, 2.0], [math.nan] * 4, [0.0, -1.0, math.nan, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0])
    selected, weights = reference.route(logits, bias, 2, shared_experts=1)
    # Expert 3 wins by its bias, but its weight comes from its raw score; ties go to the lower expert; NaN ranks first.
    assert selected.tolist() == [[3, 1, 4], [3, 0, 4], [0, 1, 4], [2, 3, 4]]
    low, high = 1 / (1 + math.e), 1 / (1 + 1 / math.e)
    assert weights[0].tolist() == pytest.approx([low, high, 1.0], rel=1e-6)
    assert weights[1].tolist() == pytest.approx([0.5, 0.5, 1.0], rel=1e-6)
    assert weights[2:, :2].isnan().all()


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("block_m", [4, 16])
def test_sort_equals_a_loop(tokens: int, load: str, block_m: int) -> None:
    selected, _ = reference.route(make_logits(tokens, 5, load, "cpu"), torch.zeros(5), 2)
    rows = reference.sort_rows(selected, 5, block_m)
    expected_tokens: list[int] = []
    expected_experts: list[int] = []
    for expert in range(5):
        mine = [token for token in range(tokens) if expert in selected[token]]
        for token in mine:
            slot = selected[token].tolist().index(expert)
            assert rows.positions[token, slot] == len(expected_tokens) + mine.index(token)
        padded = -(-len(mine) // block_m) * block_m
        expected_tokens += mine + [-1] * (padded - len(mine))
        expected_experts += [expert] * (padded // block_m)
    unneeded = len(rows.expert_of_block) - len(expected_experts)
    assert unneeded >= 0
    assert rows.expert_of_block.tolist() == expected_experts + [-1] * unneeded
    assert rows.tokens.tolist() == expected_tokens + [-1] * unneeded * block_m


def test_block_bound_is_reached() -> None:
    # The worst load gives every occupied expert one row over a whole number of blocks.
    for tokens, slots, experts, block_m in ((1, 3, 53, 64), (8, 4, 54, 64), (512, 3, 53, 16), (100, 1, 3, 64)):
        rows, bound = tokens * slots, reference.block_bound(tokens, slots, experts, block_m)
        occupied = min(rows, experts)
        counts = [1] * occupied
        counts[0] += (rows - occupied) // block_m * block_m
        assert sum(counts) <= rows and sum(-(-count // block_m) for count in counts) == bound
