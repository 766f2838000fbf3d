"""The MoE block at the 4B-A0.5B preset on the GPU: all tabled configurations, loads, CUDA graphs, independent rows.

How near FP8 results come. The tensor cores align the products of a partial sum and keep 13 bits of them below the
largest, so an activated value is off by about 2**-12 of its row's typical value, and of the codes that it is rounded to
one in a hundred falls to its neighbour, 1/16 of its value away on average (emulated: 1 % of the codes, 0.2 % error of a
row on average). A row's few largest values weigh most: where one of those falls to its neighbour, that row is off by 1
or 2 %. Hence a narrow bound on average and a wide one for a single row. A wrong expert, token or scale moves a row by
its whole length. Rounding differs in no other way, so the second GEMM is held to rounding alone, given the same codes.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.moe import reference
from loka_serve.kernels.moe.reference import ExpertWeights
from loka_serve.kernels.quantize.reference import expand_row_blocks, quantize_row_blocks_e4m3
from tests.kernels.moe.cases import LOADS, make_logits, make_rows

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from loka_serve.kernels.moe import sweep
from loka_serve.kernels.moe.block import moe_block
from loka_serve.kernels.moe.configurations import BF16_CONFIGURATIONS, FP8_CONFIGURATIONS, Configuration
from loka_serve.kernels.moe.cuda import WarpSpecialized
from loka_serve.kernels.moe.experts import Tiling, expert_linear, gate_up_swiglu
from loka_serve.kernels.moe.libraries import DeepGemm, deep_gemm_takes, with_groups
from loka_serve.kernels.moe.workload import D_MODEL, ROUTED, TOP_K, make_weights

# Of the sweep's candidates, one of each kind: persistent, by descriptors, in order, and by the library.
LARGE, SMALL = Tiling(128, 8, 3, persistent=1), Tiling(64, 8, 4, persistent=1)
DESCRIBED = replace(LARGE, described=True)
KINDS = [
    Configuration(SMALL, replace(SMALL, paired=True)),
    Configuration(LARGE, replace(LARGE, paired=True)),
    Configuration(replace(DESCRIBED, persistent=64), DESCRIBED),
    Configuration(replace(DESCRIBED, ordered=True), replace(DESCRIBED, persistent=0, stages=4)),
    Configuration(Tiling(64, 8, 4, described=True), Tiling(64, 8, 4, described=True, wide=True)),
    Configuration(Tiling(16, 4, 4, described=True), Tiling(16, 4, 4, described=True, paired=True)),
    Configuration(DeepGemm(), DeepGemm()),
    Configuration(DeepGemm(ends=False), DeepGemm(ends=False)),
    Configuration(LARGE, DeepGemm()),
]
FP8_KINDS = [Configuration(WarpSpecialized(), DeepGemm()), Configuration(WarpSpecialized(), WarpSpecialized())]


CONFIGURATIONS = [
    pytest.param(
        fp8,
        configuration,
        id=f"{'fp8' if fp8 else 'bf16'} {sweep.name(configuration.gate_up)} {sweep.name(configuration.down)}",
    )
    for fp8, table in ((False, BF16_CONFIGURATIONS), (True, FP8_CONFIGURATIONS))
    for configuration in [*(configuration for _, configuration in table), *KINDS, *(FP8_KINDS if fp8 else [])]
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
    if configuration is not None:
        skip_without_library(configuration, weights)
    return moe_block(x, scale, logits, bias, weights, TOP_K, configuration=configuration)


def skip_without_library(configuration: Configuration, weights: ExpertWeights) -> None:
    if configuration.library is not None and not deep_gemm_takes(weights.gate_up_scale, weights.gate_up):
        pytest.skip("deep_gemm is not installed, or not for this device")


def at(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor; torch cannot index E4M3."""
    return tensor.view(torch.uint8)[index].view(tensor.dtype) if tensor.element_size() == 1 else tensor[index]


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Of each row: the length of the difference over the length of what is expected."""
    return (found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)


def check_rows(found: Tensor, expected: Tensor, on_average: float, at_most: float, selected: Any = None) -> None:
    """Both bounds hold; the message says which rows are far off, and how far the others are."""
    errors = row_errors(found, expected)
    worst = errors.nan_to_num(math.inf).argsort(descending=True)[:8].tolist()
    quantiles = torch.quantile(errors, torch.tensor([0.5, 0.9, 0.99], device=errors.device)).tolist()
    text = f"{int((errors > on_average).sum())} of {len(errors)} rows beyond {on_average:.4f}; "
    text += f"mean {errors.mean():.5f}, 50, 90, 99 %: {', '.join(f'{value:.5f}' for value in quantiles)}; worst: "
    text += ", ".join(f"row {row} {errors[row]:.4f}" for row in worst)
    if selected is not None:
        text += f"; experts of the worst: {[selected[row].tolist() for row in worst[:3]]}"
    assert errors.max() < at_most, text
    assert errors.mean() < on_average or len(errors) < 64, text


def check_block(
    found: Tensor, expected: Tensor, configuration: Configuration | None, fp8: bool, logits: Tensor
) -> None:
    """The whole block against its reference."""
    rounded = configuration is not None and isinstance(configuration.gate_up, DeepGemm)  # gate and up, to bfloat16
    if fp8:
        on_average, at_most = (2**-6, 2**-4) if rounded else (2**-7, 2**-5)
    else:  # the roundings of the activated values and of the outputs, 2**-9 each
        on_average, at_most = (2**-7, 2**-7) if rounded else (2**-8, 2**-8)
    selected, _ = reference.route(logits, torch.zeros(ROUTED, device="cuda"), TOP_K)
    check_rows(found, expected, on_average, at_most, selected)


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
    check_block(out, expected, configuration, fp8, logits)


@pytest.mark.parametrize("load", ["random", "skewed"])
@pytest.mark.parametrize(("fp8", "configuration"), CONFIGURATIONS)
def test_each_gemm_equals_its_reference(
    all_weights: dict[bool, ExpertWeights], load: str, fp8: bool, configuration: Configuration
) -> None:
    weights, count = all_weights[fp8], 300
    skip_without_library(configuration, weights)
    x, scale = tokens_of(count, fp8)
    selected, _ = reference.route(make_logits(count, ROUTED, load, "cuda"), torch.zeros(ROUTED, device="cuda"), TOP_K)
    rows = reference.sort_rows(selected, len(weights.down), configuration.gate_up.block_m)
    if configuration.library is not None:
        rows = with_groups(rows, len(weights.down), configuration.library)
    used = rows.tokens >= 0
    first = (x, scale, weights.gate_up, weights.gate_up_scale, rows)
    expected = reference.gate_up_swiglu(*first)
    rounded = isinstance(configuration.gate_up, DeepGemm)
    if not isinstance(configuration.gate_up, WarpSpecialized):
        hidden, none = gate_up_swiglu(*first, configuration.gate_up, quantize=False)
        assert none is None
        check_rows(hidden[used], expected[used], 2**-7 if rounded else 2**-8, 2**-7 if rounded else 2**-8)
    if fp8:
        codes, code_scale = gate_up_swiglu(*first, configuration.gate_up, quantize=True)
        assert code_scale is not None
        wide = expand_row_blocks(code_scale[used], codes.shape[1])
        found = codes.float()[used] * wide
        # Half a step, which is 1/16 of the value at most and 2**-10 of a code next to zero, and what the sums are off.
        most = expected[used].abs() / 16 + wide * 2**-10 + 2**-7 * expected[used].norm(dim=1, keepdim=True)
        assert ((found - expected[used]).abs() <= most).all()
        given = (codes, code_scale)
    else:
        given = (hidden, None)
    out = expert_linear(*given, weights.down, weights.down_scale, rows, configuration.down)
    again = reference.expert_linear(*given, weights.down, weights.down_scale, rows)
    check_rows(out[used], again[used], 2**-8, 2**-8)


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
    check_block(out[:64], expected, None, True, logits[:64])
    assert out.isfinite().all()
