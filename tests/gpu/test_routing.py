"""Fused router and sort at the 4B-A0.5B preset on the GPU: every tiling, loads, CUDA graphs, independent tokens."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.moe import reference
from loka_serve.kernels.moe.reference import SortedRows
from tests.kernels.moe.cases import make_rows

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from loka_serve.kernels.moe import bench_routing
from loka_serve.kernels.moe.routing import Router, RouterTiling, choose_tiling, route, route_and_sort, sort_rows
from loka_serve.kernels.moe.workload import D_MODEL, EXPERTS, ROUTED, TOP_K

TOKENS = (1, 8, 16, 17, 64, 512, 2112, 4096, 16384)


def make_router(tokens: int, seed: int = 0) -> Router:
    weight = make_rows(ROUTED, D_MODEL, "cuda", seed + 1).float() / (3 * math.sqrt(D_MODEL))
    return Router(make_rows(tokens, D_MODEL, "cuda", seed), weight.bfloat16())


def bias_of(load: str) -> Tensor:
    bias = torch.zeros(ROUTED, device="cuda")
    if load == "few experts":
        bias[5:8] = 2.0
    return bias


def check(router: Router, bias: Tensor, slot_weights: Tensor, rows: SortedRows) -> None:
    """Experts and weights as float64 has them, but for tokens near a tie; rows exactly as the reference sorts them."""
    logits = router.x.double() @ router.weight.double().T
    _, weights = reference.route(logits.float(), bias, TOP_K, 1)
    ranked = (torch.sigmoid(logits) + bias).sort(dim=1, descending=True)
    clear = (ranked.values[:, :TOP_K] - ranked.values[:, 1 : TOP_K + 1]).amin(1) > 1e-5
    assert clear.float().mean() > 0.9
    torch.testing.assert_close(slot_weights[clear], weights[clear], rtol=2e-5, atol=0)
    # Which expert a token went to, read from the block that its row lies in.
    selected = rows.expert_of_block[(rows.positions // rows.block_m).long()]
    assert torch.equal(selected[clear, :TOP_K].long(), ranked.indices[clear, :TOP_K])
    assert (selected[:, TOP_K] == ROUTED).all()
    expected = reference.sort_rows(selected, EXPERTS, rows.block_m)
    assert torch.equal(rows.expert_of_block, expected.expert_of_block)
    assert torch.equal(rows.positions, expected.positions)
    assert torch.equal(rows.block_count, expected.block_count)
    needed = int(expected.block_count) * rows.block_m
    assert torch.equal(rows.tokens[:needed], expected.tokens[:needed])


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("load", ["random", "few experts"])
@pytest.mark.parametrize("block_m", [64, 128])
def test_as_the_block_launches_it(tokens: int, load: str, block_m: int) -> None:
    router, bias = make_router(tokens), bias_of(load)
    check(router, bias, *route_and_sort(router, bias, TOP_K, 1, block_m))


@pytest.mark.parametrize("tiling", bench_routing.CANDIDATES, ids=str)
def test_every_tiling(tiling: RouterTiling) -> None:
    router, bias = make_router(300), bias_of("random")
    routing = route(router, bias, TOP_K, 1, tiling)
    check(router, bias, routing.weights, sort_rows(routing, EXPERTS, 64))


@pytest.mark.parametrize("tokens", [1, 17, 40, 64])
def test_one_launch_equals_two(tokens: int) -> None:
    router, bias = make_router(tokens), bias_of("random")
    weights, rows = route_and_sort(router, bias, TOP_K, 1, 64, joint_tokens=64)
    check(router, bias, weights, rows)


def test_a_token_is_routed_alike_in_every_batch_of_a_tiling() -> None:
    router, bias = make_router(1000), bias_of("random")
    whole = route(router, bias, TOP_K, 1)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).cuda()
    for index in (order, order[:90], order[:1]):
        assert choose_tiling(len(index)) == choose_tiling(1000)
        few = route(Router(router.x[index], router.weight), bias, TOP_K, 1)
        assert torch.equal(few.selected, whole.selected[index]) and torch.equal(few.weights, whole.weights[index])
    router.x[3] = math.nan
    poisoned = route(router, bias, TOP_K, 1)
    others = torch.arange(1000, device="cuda") != 3
    assert poisoned.weights[3, :TOP_K].isnan().all() and poisoned.selected[3].tolist() == [0, 1, 2, ROUTED]
    assert torch.equal(poisoned.selected[others], whole.selected[others])
    assert torch.equal(poisoned.weights[others], whole.weights[others])


@pytest.mark.parametrize("tokens", [8, 4096])
def test_one_graph_serves_every_load(tokens: int) -> None:
    router, bias = make_router(tokens), bias_of("random")
    route_and_sort(router, bias, TOP_K, 1, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, rows = route_and_sort(router, bias, TOP_K, 1, 64)
    for seed, load in enumerate(("random", "few experts", "random")):
        router.x.copy_(make_router(tokens, seed).x)
        bias.copy_(bias_of(load))
        graph.replay()
        check(router, bias, weights, rows)


def test_most_experts_and_slots() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randint(-6, 7, (300, 200), generator=generator) / 4).bfloat16().cuda()
    weight = torch.zeros(255, 200, dtype=torch.bfloat16, device="cuda")
    weight[torch.arange(255), torch.arange(255) % 200] = 1.0  # logits are quarters, many of them equal
    bias = torch.zeros(255, device="cuda")
    selected, weights = reference.route(x.float() @ weight.float().T, bias, 8, 1)
    for tokens in (11, 300):
        slot_weights, rows = route_and_sort(Router(x[:tokens].contiguous(), weight), bias, 8, 1, 64)
        torch.testing.assert_close(slot_weights, weights[:tokens], rtol=1e-6, atol=0)
        assert torch.equal(rows.positions, reference.sort_rows(selected[:tokens], 256, 64).positions)
