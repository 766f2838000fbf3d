"""The dense GEMM in every tiling and recipe at odd shapes against the reference, and compiled for Hopper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.linear import reference
from loka_serve.kernels.linear.implementations import RECIPES, linear, weight_scale_for
from loka_serve.kernels.linear.workload import make_operands
from tests.kernels.devices import DEVICE, compile_for_hopper, needs_triton

pytestmark = needs_triton

# Float32 sums in another order; bfloat16 adds one rounding (2**-9 of the value, doubled for the neighbour). The FP8
# tensor cores of a GPU, unlike the interpreter, keep about 14 bits of the sum of a slice.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5} if DEVICE == "cpu" else {"rtol": 2**-9, "atol": 2**-9},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9},
}
SMALL, MIDDLE = "triton_16x32", "triton_64x64"


def check(operands: tuple[Tensor, Tensor | None, Tensor, Tensor | None], name: str, out_dtype: torch.dtype) -> None:
    out = linear(*operands, name, out_dtype)
    assert out.dtype == out_dtype and out.shape == (len(operands[0]), len(operands[2]))
    torch.testing.assert_close(out.float(), reference.linear(*operands), **TOLERANCE[out_dtype])


# 150 channels end inside a tile of scales, 24 inside a program; K 192 and 80 inside a slice; 19 rows inside a block.
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 24, 128), (19, 150, 192), (5, 160, 80)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_odd_shapes(rows: int, n: int, k: int, recipe: str, out_dtype: torch.dtype) -> None:
    check(make_operands(recipe, rows, n, k, DEVICE), SMALL, out_dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_tiling(recipe: str) -> None:
    from loka_serve.kernels.linear.tilings import TILINGS

    operands = make_operands(recipe, 7, 272, 384, DEVICE)
    for name in TILINGS:
        check(operands, name, torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_blocks_of_rows(recipe: str) -> None:
    # 11 blocks of 16 rows: a whole group of blocks and part of another, over three tiles.
    check(make_operands(recipe, 170, 80, 128, DEVICE), SMALL, torch.float32)


@pytest.mark.parametrize("name", [SMALL, "torch", MIDDLE])
def test_any_layout_of_the_scales(name: str) -> None:
    x, scale, weight, weight_scale = make_operands("fp8_block", 6, 150, 640, DEVICE)
    assert scale is not None and weight_scale is not None and weight_scale.shape == (2, 5)
    laid_out = weight_scale_for(name, weight_scale)
    assert laid_out is not None and torch.equal(laid_out, weight_scale)
    assert laid_out.stride() == ((8, 1) if name == "torch" else (5, 1))
    if name == "torch":
        assert weight_scale_for(name, laid_out) is laid_out
        return
    for given in (scale, scale.contiguous()):
        for of_weight in (laid_out, weight_scale_for("torch", weight_scale)):
            check((x, given, weight, of_weight), name, torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_do_not_depend_on_their_neighbours(recipe: str) -> None:
    x, scale, weight, weight_scale = make_operands(recipe, 20, 40, 256, DEVICE)
    whole = linear(x, scale, weight, weight_scale, SMALL)
    some = None if scale is None else scale[3:9]
    assert torch.equal(linear(x[3:9], some, weight, weight_scale, SMALL), whole[3:9])
    # What quantizing a row with a NaN gives: NaN scales. (The interpreter reads E4M3's NaN as a number.)
    (x if scale is None else scale)[5] = math.nan
    out = linear(x, scale, weight, weight_scale, SMALL)
    others = torch.arange(20, device=DEVICE) != 5
    assert out[5].isnan().all() and torch.equal(out[others], whole[others])


def test_padding_rows_may_hold_anything() -> None:
    x, scale, weight, weight_scale = make_operands("fp8_block", 5, 32, 256, DEVICE)
    assert scale is not None
    whole = linear(x, scale, weight, weight_scale, SMALL)
    scale.as_strided((8, 2), (1, 8))[5:] = math.nan  # the rows that pad the column-major scales
    assert torch.equal(linear(x, scale, weight, weight_scale, SMALL), whole)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe: str) -> None:
    out = linear(*make_operands(recipe, 0, 48, 128, DEVICE), SMALL, torch.float32)
    assert out.shape == (0, 48) and out.dtype == torch.float32


def signature(recipe: str, out_dtype: torch.dtype) -> dict[str, str]:
    element = "*bf16" if recipe == "bf16" else "*fp8e4nv"
    return {
        **dict.fromkeys(("x_ptr", "weight_ptr"), element),
        **dict.fromkeys(("x_scale_ptr", "weight_scale_ptr"), "*fp32"),
        "out_ptr": "*bf16" if out_dtype == torch.bfloat16 else "*fp32",
        **dict.fromkeys(("x_scale_row_stride", "x_scale_block_stride", "weight_scale_stride"), "i32"),
        **dict.fromkeys(("rows", "N", "K"), "i32"),
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tall", [False, True])
def test_every_tiling_compiles_for_hopper(recipe: str, tall: bool) -> None:
    from loka_serve.kernels.linear.tilings import TILINGS
    from loka_serve.kernels.linear.triton import GROUP_M, linear_kernel

    configurations = []
    for tiling in TILINGS.values():
        if (tiling.block_m >= 64) != tall:
            continue
        block_k = 128 if recipe == "fp8_block" else tiling.k_bytes // (2 if recipe == "bf16" else 1)
        configuration = {
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "BLOCK_K": block_k,
            "GROUP_M": GROUP_M,
            "EVEN_K": True,
            "SCALES": RECIPES.index(recipe),
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
        configurations += [configuration, {**configuration, "out_ptr": "*fp32"}]
    # Blocks of 16 rows are too low for Hopper's own instructions.
    instruction = "wgmma" if tall else "mma.sync"
    compile_for_hopper(linear_kernel, signature(recipe, torch.bfloat16), configurations, instruction=instruction)
