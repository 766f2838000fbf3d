"""The MoE block at the 4B-A0.5B preset on the GPU: all tabled configurations, loads, CUDA graphs, independent rows."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.moe import reference
from loka_serve.kernels.moe.reference import ExpertWeights
from loka_serve.kernels.quantize.reference import quantize_row_blocks_e4m3
from tests.kernels.moe.cases import LOADS, make_logits, make_rows

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from loka_serve.kernels.moe.block import BF16_CONFIGURATIONS, FP8_CONFIGURATIONS, Configuration, moe_block
from loka_serve.kernels.moe.experts import Tiling
from loka_serve.kernels.moe.workload import D_MODEL, ROUTED, TOP_K, make_weights

# Tilings that the sweep tries in their persistent form.
PERSISTENT = [
    Configuration(tiling, replace(tiling, paired=True))
    for tiling in (Tiling(64, 8, 4, persistent=1), Tiling(128, 8, 3, persistent=1))
]
CONFIGURATIONS = [
    pytest.param(fp8, configuration, id=f"{'fp8' if fp8 else 'bf16'} {configuration.gate_up}")
    for fp8, table in ((False, BF16_CONFIGURATIONS), (True, FP8_CONFIGURATIONS))
    for configuration in [*(configuration for _, configuration in table), *PERSISTENT]
]


@pytest.fixture(scope="module")
def all_weights() -> dict[bool, ExpertWeights]:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 tensor cores need compute capability 8.9")
    return {fp8: make_weights(fp8) for fp8 in (False, True)}


def tokens_of(count: int, fp8: bool, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    x = make_rows(count, D_MODEL, "cuda", seed)
    return quantize_row_blocks_e4m3(x) if fp8 else (x, None)


def run(
    x: Tensor, scale: Tensor | None, logits: Tensor, weights: ExpertWeights, configuration: Configuration | None = None
) -> Tensor:
    bias = torch.zeros(ROUTED, device="cuda")
    return moe_block(x, scale, logits, bias, weights, TOP_K, configuration=configuration)


def at(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor; torch cannot index E4M3."""
    return tensor.view(torch.uint8)[index].view(tensor.dtype) if tensor.element_size() == 1 else tensor[index]


def error(found: Tensor, expected: Tensor) -> float:
    return float(((found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)).max())


# FP8 tensor cores keep about 14 bits of a partial sum, so some activated codes fall to a neighbour (1/16 of the value);
# BF16 differs by the roundings of the activated values and of the outputs (2**-9 each).
TOLERANCE = {False: 2**-8, True: 2**-7}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize(("fp8", "configuration"), CONFIGURATIONS)
def test_equals_reference(
    all_weights: dict[bool, ExpertWeights], load: str, count: int, fp8: bool, configuration: Configuration
) -> None:
    x, scale = tokens_of(count, fp8)
    logits = make_logits(count, ROUTED, load, "cuda")
    out = run(x, scale, logits, all_weights[fp8], configuration)
    bias = torch.zeros(ROUTED, device="cuda")
    expected = reference.moe_block(x, scale, logits, bias, all_weights[fp8], TOP_K)
    assert error(out, expected) < TOLERANCE[fp8]


@pytest.mark.parametrize(("fp8", "configuration"), CONFIGURATIONS)
def test_rows_do_not_depend_on_their_neighbours(
    all_weights: dict[bool, ExpertWeights], fp8: bool, configuration: Configuration
) -> None:
    x, scale = tokens_of(700, fp8)
    logits = make_logits(700, ROUTED, "skewed", "cuda")
    out = run(x, scale, logits, all_weights[fp8], configuration)
    order = torch.randperm(700, generator=torch.Generator().manual_seed(0)).cuda()
    for index in (order, order[:90]):  # another order, and a smaller batch
        moved = run(
            at(x, index), None if scale is None else scale[index], logits[index], all_weights[fp8], configuration
        )
        assert torch.equal(moved, out[index])
    logits[5] = math.nan
    poisoned = run(x, scale, logits, all_weights[fp8], configuration)
    others = torch.arange(700, device="cuda") != 5
    assert poisoned[5].isnan().all() and torch.equal(poisoned[others], out[others])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("count", [64, 4096])
def test_one_graph_serves_every_load(all_weights: dict[bool, ExpertWeights], fp8: bool, count: int) -> None:
    x, scale = tokens_of(count, fp8)
    logits = make_logits(count, ROUTED, "random", "cuda")
    run(x, scale, logits, all_weights[fp8])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, scale, logits, all_weights[fp8])
    for seed, load in enumerate(LOADS):
        logits.copy_(make_logits(count, ROUTED, load, "cuda", seed))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, run(x, scale, logits, all_weights[fp8]))


def test_large_batch(all_weights: dict[bool, ExpertWeights]) -> None:
    # 16,384 tokens: many chunks in the sort, several blocks an expert; checked on the first tokens, which stand alone.
    x, scale = tokens_of(16384, True)
    logits = make_logits(16384, ROUTED, "random", "cuda")
    out = run(x, scale, logits, all_weights[True])
    assert scale is not None
    bias = torch.zeros(ROUTED, device="cuda")
    expected = reference.moe_block(x[:64], scale[:64], logits[:64], bias, all_weights[True], TOP_K)
    assert error(out[:64], expected) < TOLERANCE[True]
    assert out.isfinite().all()
