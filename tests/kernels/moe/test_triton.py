"""The grouped GEMMs and the whole block against their references, in every recipe and at odd shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.moe import reference
from loka_serve.kernels.moe.reference import ExpertWeights, SortedRows
from loka_serve.kernels.quantize.reference import expand_row_blocks, quantize_row_blocks_e4m3
from tests.kernels.devices import DEVICE, assert_codes_close, needs_triton
from tests.kernels.moe.cases import LOADS, make_logits, make_rows, make_weights, quantize_inputs, quantize_weight

pytestmark = needs_triton

RECIPES = ("bf16", "fp8_row", "fp8_block")
EXPERTS, TOP_K, BLOCK_M = 5, 2, 16
# bfloat16 outputs: one rounding (2**-9 of the value, doubled for the neighbour) of sums in another order.
TOLERANCE = {"rtol": 2**-7, "atol": 2**-10}


def sort(tokens: int, load: str, block_m: int = BLOCK_M) -> SortedRows:
    selected, _ = reference.route(
        make_logits(tokens, EXPERTS, load, DEVICE), torch.zeros(EXPERTS, device=DEVICE), TOP_K
    )
    return reference.sort_rows(selected, EXPERTS, block_m)


def tiling(**changes: object):  # type: ignore[no-untyped-def]
    from loka_serve.kernels.moe.experts import Tiling

    return Tiling(**{"block_m": BLOCK_M, "warps": 4, "stages": 2, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gate_up(tokens: int, load: str, recipe: str) -> None:
    from loka_serve.kernels.moe.experts import gate_up_swiglu

    d_model, width = 192, 128
    rows = sort(tokens, load)
    x, scale = quantize_inputs(make_rows(tokens, d_model, DEVICE), recipe)
    weights = make_weights(EXPERTS, d_model, width, recipe, DEVICE)
    operands = (x, scale, weights.gate_up, weights.gate_up_scale, rows)
    expected = reference.gate_up_swiglu(*operands)
    used = rows.tokens >= 0
    hidden, no_scale = gate_up_swiglu(*operands, tiling(), quantize=False)
    assert no_scale is None and hidden.shape == expected.shape
    torch.testing.assert_close(hidden[used].float(), expected[used], **TOLERANCE)
    expected_codes, expected_scale = quantize_row_blocks_e4m3(expected)
    for persistent in (0, 1):
        codes, hidden_scale = gate_up_swiglu(*operands, tiling(persistent=persistent), quantize=True)
        assert hidden_scale is not None
        # Not rounded before it is quantized; FP8 tensor cores keep about 14 bits of a partial sum.
        torch.testing.assert_close(hidden_scale[used], expected_scale[used], rtol=2**-10, atol=0)
        assert_codes_close(codes[used], expected_codes[used])


# width 64: gate and up share a tile of weight scales. 192: up starts in the middle of one. 320: an odd number of tiles.
@pytest.mark.parametrize(("d_model", "width"), [(64, 64), (128, 192), (320, 320)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_shapes(d_model: int, width: int, recipe: str) -> None:
    from loka_serve.kernels.moe.experts import expert_linear, gate_up_swiglu

    rows = sort(9, "random")
    weights = make_weights(EXPERTS, d_model, width, recipe, DEVICE)
    used = rows.tokens >= 0
    x, scale = quantize_inputs(make_rows(9, d_model, DEVICE), recipe)
    operands = (x, scale, weights.gate_up, weights.gate_up_scale, rows)
    codes, hidden_scale = gate_up_swiglu(*operands, tiling(), quantize=True)
    expected_codes, expected_scale = quantize_row_blocks_e4m3(reference.gate_up_swiglu(*operands))
    assert hidden_scale is not None
    torch.testing.assert_close(hidden_scale[used], expected_scale[used], rtol=2**-10, atol=0)
    assert_codes_close(codes[used], expected_codes[used])
    hidden, scale = quantize_inputs(make_rows(len(rows.tokens), width, DEVICE), recipe)
    down = (hidden, scale, weights.down, weights.down_scale, rows)
    for paired in (False, True):
        out = expert_linear(*down, tiling(paired=paired))
        torch.testing.assert_close(out[used].float(), reference.expert_linear(*down)[used], **TOLERANCE)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("paired", "persistent"), [(False, 0), (True, 0), (False, 1)])
def test_down(load: str, recipe: str, paired: bool, persistent: int) -> None:
    from loka_serve.kernels.moe.experts import expert_linear

    d_model, width = 384, 192
    rows = sort(40, load)
    hidden, scale = quantize_inputs(make_rows(len(rows.tokens), width, DEVICE), recipe)
    weights = make_weights(EXPERTS, d_model, width, recipe, DEVICE)
    operands = (hidden, scale, weights.down, weights.down_scale, rows)
    out = expert_linear(*operands, tiling(paired=paired, persistent=persistent))
    used = rows.tokens >= 0
    torch.testing.assert_close(out[used].float(), reference.expert_linear(*operands)[used], **TOLERANCE)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("width", "persistent"), [(128, 0), (192, 1)])
def test_descriptors_order_and_groups_change_nothing(recipe: str, width: int, persistent: int) -> None:
    from loka_serve.kernels.moe.experts import expert_linear, gate_up_swiglu

    d_model = 192  # one and a half slices of K; the last box of each reaches beyond it
    rows = sort(40, "skewed")
    used = rows.tokens >= 0
    x, scale = quantize_inputs(make_rows(40, d_model, DEVICE), recipe)
    weights = make_weights(EXPERTS, d_model, width, recipe, DEVICE)
    first = (x, scale, weights.gate_up, weights.gate_up_scale, rows)
    hidden, _ = gate_up_swiglu(*first, tiling(), quantize=False)
    for ordered in (False, True):
        changed = tiling(described=True, ordered=ordered, persistent=persistent, group_m=2)
        found, _ = gate_up_swiglu(*first, changed, quantize=False)
        assert torch.equal(found[used], hidden[used])
    x, scale = quantize_inputs(make_rows(len(rows.tokens), width, DEVICE), recipe)
    second = (x, scale, weights.down, weights.down_scale, rows)
    out = expert_linear(*second, tiling())
    for changes in ({"described": True, "paired": True}, {"described": True, "wide": True}, {"wide": True}):
        found = expert_linear(*second, tiling(persistent=persistent, **changes))
        assert torch.equal(found[used], out[used])


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_expert_in_place_is_a_dense_linear(recipe: str) -> None:
    from loka_serve.kernels.moe.experts import expert_linear, gate_up_swiglu

    generator = torch.Generator().manual_seed(0)
    weight, weight_scale = quantize_weight(torch.randn(1, 256, 192, generator=generator).to(DEVICE) / 14, recipe)
    x, scale = quantize_inputs(make_rows(37, 192, DEVICE), recipe)
    none = torch.zeros(0, dtype=torch.int32)
    everything = SortedRows(torch.arange(37, device=DEVICE), torch.zeros(1, dtype=torch.int32), none, none, 37)
    operands = (x, scale, weight, weight_scale)
    out = expert_linear(*operands, None, tiling(persistent=1))
    torch.testing.assert_close(out.float(), reference.expert_linear(*operands, everything), **TOLERANCE)
    hidden, _ = gate_up_swiglu(*operands, None, tiling(), quantize=False)
    torch.testing.assert_close(hidden.float(), reference.gate_up_swiglu(*operands, everything), **TOLERANCE)


def test_infinities_and_extreme_gates() -> None:
    from loka_serve.kernels.moe.experts import gate_up_swiglu

    # Gates of +-200 saturate the sigmoid, and its exponential overflows for the negative ones.
    x = torch.eye(4, 128, device=DEVICE).bfloat16()
    weight = torch.zeros(1, 256, 128, device=DEVICE)
    weight[0, :128] = torch.tensor([200.0, -200.0, 60.0, -60.0], device=DEVICE).repeat(32)[None, :]
    weight[0, 128:] = 1.5
    out, _ = gate_up_swiglu(x, None, weight.bfloat16(), None, None, tiling(), quantize=False)
    expected = torch.tensor([300.0, 0.0, 90.0, 0.0], device=DEVICE)
    torch.testing.assert_close(out.float(), expected[:, None].expand(4, 128), rtol=2**-8, atol=1e-20)


def run_block(x: Tensor, logits: Tensor, weights: ExpertWeights, recipe: str, **more: Tensor) -> tuple[Tensor, Tensor]:
    """The block and its reference."""
    from loka_serve.kernels.moe.block import moe_block
    from loka_serve.kernels.moe.configurations import Configuration

    codes, scale = quantize_inputs(x, recipe)
    bias = torch.linspace(0, 0.1, logits.shape[1], device=DEVICE)
    arguments = (codes, scale, logits, bias, weights, TOP_K)
    out = moe_block(*arguments, **more, configuration=Configuration(tiling(), tiling(paired=True)))
    return out, reference.moe_block(*arguments, **more)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("shared_experts", [0, 1])
def test_block(tokens: int, load: str, recipe: str, shared_experts: int) -> None:
    logits = make_logits(tokens, EXPERTS, load, DEVICE)
    weights = make_weights(EXPERTS + shared_experts, 192, 128, recipe, DEVICE)
    more = {"residual": make_rows(tokens, 192, DEVICE, seed=3)}
    if not shared_experts:
        more["shared"] = make_rows(tokens, 192, DEVICE, seed=4)
    out, expected = run_block(make_rows(tokens, 192, DEVICE), logits, weights, recipe, **more)
    # Three roundings to bfloat16 (2**-9 each at most), and now and then an activated code that falls to its neighbour.
    error = (out.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    assert error.max() < 2**-7


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_a_poisoned_token_stays_alone(recipe: str) -> None:
    x = make_rows(20, 192, DEVICE)
    logits = make_logits(20, EXPERTS, "random", DEVICE)
    weights = make_weights(EXPERTS, 192, 128, recipe, DEVICE)
    clean, _ = run_block(x, logits, weights, recipe)
    x[7, 3] = math.nan
    poisoned, _ = run_block(x, logits, weights, recipe)
    others = torch.arange(20, device=DEVICE) != 7
    assert poisoned[7].isnan().all()
    assert torch.equal(poisoned[others], clean[others])


def test_scales_read_as_they_lie_in_memory() -> None:
    from loka_serve.kernels.moe.experts import expert_linear
    from loka_serve.kernels.quantize.triton import allocate_scales

    x, row_major = quantize_inputs(make_rows(9, 256, DEVICE), "fp8_block")
    assert row_major is not None
    column_major = allocate_scales(9, 256, 2, x.device).copy_(row_major)
    assert column_major.stride() != row_major.stride()
    weight, weight_scale = quantize_weight(torch.eye(256, device=DEVICE)[None], "fp8_block")
    expected = (x.float() * expand_row_blocks(row_major, 256)).bfloat16()
    for scale in (row_major, column_major):
        out = expert_linear(x, scale, weight, weight_scale, None, tiling())
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)  # a tie of the one rounding may fall otherwise


def test_wrong_arguments_are_named() -> None:
    from loka_serve.kernels.moe.experts import expert_linear, gate_up_swiglu

    rows = sort(7, "random")
    weights = make_weights(EXPERTS, 192, 128, "fp8_block", DEVICE)
    x, scale = quantize_inputs(make_rows(7, 192, DEVICE), "fp8_block")
    with pytest.raises(ValueError, match="x: expected contiguous torch.bfloat16"):
        gate_up_swiglu(x, None, weights.gate_up, None, rows, tiling(), False)
    with pytest.raises(ValueError, match="weight: expected contiguous torch.float8_e4m3fn"):
        gate_up_swiglu(x, scale, weights.gate_up.float(), weights.gate_up_scale, rows, tiling(), False)
    with pytest.raises(ValueError, match="scale, weight_scale: expected shapes"):
        gate_up_swiglu(x, scale, weights.gate_up, None, rows, tiling(), False)
    with pytest.raises(ValueError, match="blocks of 16"):
        gate_up_swiglu(x, scale, weights.gate_up, weights.gate_up_scale, rows, tiling(block_m=32), False)
    with pytest.raises(ValueError, match="one expert"):
        gate_up_swiglu(x, scale, weights.gate_up, weights.gate_up_scale, None, tiling(), False)
    narrow = torch.zeros(7, 24, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.ones(7, 1, device=DEVICE)
    weight = torch.zeros(EXPERTS, 128, 24, device=DEVICE).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="rows of 24 x torch.float8_e4m3fn cannot be described"):
        ones = torch.ones(EXPERTS, 1, 1, device=DEVICE)
        gate_up_swiglu(narrow, scale, weight, ones, rows, tiling(described=True), False)
    codes, hidden_scale = quantize_inputs(make_rows(7, 128, DEVICE), "fp8_block")
    with pytest.raises(ValueError, match=f"x: expected {len(rows.tokens)} sorted rows, got 7"):
        expert_linear(codes, hidden_scale, weights.down, weights.down_scale, rows, tiling())
