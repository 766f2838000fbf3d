"""Every implementation of the dense linear at the 4B-A0.5B preset on the GPU, and dispatch measured there."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.dispatch import Dispatch, Shape
from loka_serve.kernels.linear import reference
from loka_serve.kernels.linear.bench import SHAPES
from loka_serve.kernels.linear.implementations import RECIPES, implementations_for, linear, weight_scale_for
from loka_serve.kernels.linear.workload import ERROR_LIMITS, largest_row_error, make_operands

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

ROWS = (1, 8, 64, 500, 4096)
# Float32 outputs have no rounding of their own. BF16: sums in another order. FP8 tensor cores keep 14 bits of a sum: of
# a whole one with fast accumulation, otherwise of a slice.
FLOAT32_LIMITS = {"bf16": 2**-13, "fp8_row": 2**-9, "fp8_block": 2**-9}


@pytest.fixture(autouse=True)
def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 tensor cores need compute capability 8.9")


def float64_product(x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """The first rows' exact products, written out apart from the reference."""
    if scale is None or weight_scale is None:
        return x.double() @ weight.double().T
    if scale.ndim == 1:
        return (x.double() * scale.double()[:, None]) @ (weight.double() * weight_scale.double()[:, None]).T
    wide = scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    tall = weight_scale.double().repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : x.shape[1]]
    return (x.double() * wide) @ (weight.double() * tall).T


def replay_over_poison(name: str, operands: tuple[Tensor, ...], out_dtype: torch.dtype) -> Tensor:
    """The result of a captured call whose output held NaN before the replay."""
    linear(*operands, name, out_dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(*operands, name, out_dtype)
    out.fill_(math.nan)
    graph.replay()
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_every_implementation(shape: tuple[int, int], rows: int, recipe: str, out_dtype: torch.dtype) -> None:
    x, scale, weight, weight_scale = make_operands(recipe, rows, *shape, "cuda", seed=rows)
    expected = reference.linear(x, scale, weight, weight_scale)
    few = slice(0, 64)
    exact = float64_product(x[few], None if scale is None else scale[few], weight, weight_scale)
    assert largest_row_error(expected[few], exact.float()) < 2**-16
    limit = ERROR_LIMITS[recipe] if out_dtype == torch.bfloat16 else FLOAT32_LIMITS[recipe]
    errors = {}
    for name in implementations_for(recipe, rows, *shape, "cuda", out_dtype):
        operands = (x, scale, weight, weight_scale_for(name, weight_scale))
        out = replay_over_poison(name, operands, out_dtype)  # type: ignore[arg-type]
        assert out.dtype == out_dtype
        errors[name] = largest_row_error(out, expected)
    bounds = dict.fromkeys(errors, limit)
    # Of the fast ones up to 120 additions, each cut to 14 bits; what libraries do within a sum is theirs to say.
    bounds |= {name: 2**-6 for name in bounds if name.endswith("_fast") or name in ("flashinfer", "torchao", "fbgemm")}
    assert {name: error for name, error in errors.items() if error >= bounds[name]} == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_triton_rows_do_not_depend_on_their_number(recipe: str) -> None:
    x, scale, weight, weight_scale = make_operands(recipe, 300, 1408, 1408, "cuda")
    for name in ("triton_16x16", "triton_64x64", "triton_128x128"):
        whole = linear(x, scale, weight, weight_scale, name)
        some = None if scale is None else scale[100:117]
        assert torch.equal(linear(x[100:117], some, weight, weight_scale, name), whole[100:117]), name


def test_scales_in_any_layout_give_the_same() -> None:
    x, scale, weight, weight_scale = make_operands("fp8_block", 64, 1408, 1408, "cuda")
    assert scale is not None
    for name in implementations_for("fp8_block", 64, 1408, 1408, "cuda"):
        expected = linear(x, scale, weight, weight_scale_for(name, weight_scale), name)
        for other in ("torch", "triton_64x64"):
            found = linear(x, scale.contiguous(), weight, weight_scale_for(other, weight_scale), name)
            assert torch.equal(found, expected), (name, other)


def test_dispatch_measures_saves_and_loads(tmp_path: Path) -> None:
    shapes = [
        Shape(op, recipe, 1408, 1408, rows)
        for op in ("linear", "linear_float32")
        for recipe in RECIPES
        for rows in (1, 64)
    ]
    dispatch = Dispatch.measure(shapes, "cuda")
    assert dispatch.covers(shapes)
    for shape, entry in dispatch.entries.items():
        # BF16 rounds to 8 bits; E4M3 to 4, which on Gaussian values is 0.08.
        low, high = (0.0, 0.02) if shape.recipe == "bf16" else (0.04, 0.12)
        assert all(low <= mere < high for mere in entry.mere.values()) and set(entry.mere) == set(entry.us)
    dispatch.save(tmp_path / "dispatch.json")
    loaded = Dispatch.load(tmp_path / "dispatch.json", "cuda")
    assert loaded == dispatch and not loaded.reason
    for shape in shapes:
        entry = dispatch.entries[shape]
        assert entry.bf16_us is not None and list(entry.us.values()) == sorted(entry.us.values())
        for rows in (1, 7, 64, 3000):
            name = loaded.choose(shape.op, shape.recipe, 1408, 1408, rows)
            operands = make_operands(shape.recipe, rows, 1408, 1408, "cuda")
            out_dtype = torch.float32 if shape.op == "linear_float32" else torch.bfloat16
            found = linear(*operands, name, out_dtype)
            assert largest_row_error(found, reference.linear(*operands)) < ERROR_LIMITS[shape.recipe]


def test_one_scale_a_tensor() -> None:
    operands = make_operands("fp8_tensor", 64, 1408, 1408, "cuda")
    expected = reference.linear(*operands)
    names = implementations_for("fp8_tensor", 64, 1408, 1408, "cuda")
    assert "torch" in names
    for name in names:
        assert largest_row_error(linear(*operands, name), expected) < 2**-6, name


def test_experts_are_measured_and_chosen() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the experts' fastest kernels need Hopper")
    shapes = [
        Shape("experts", recipe, 1408, 1408, tokens, groups=54, slots=4, shared=1)
        for recipe in ("bf16", "fp8_block")
        for tokens in (8, 512)
    ]
    dispatch = Dispatch.measure(shapes, "cuda")
    assert dispatch.covers(shapes)
    for shape, entry in dispatch.entries.items():
        assert len(entry.us) >= 2 and entry.bf16_us is not None
        # Two GEMMs in a row: a little more than one's error.
        low, high = (0.0, 0.03) if shape.recipe == "bf16" else (0.05, 0.2)
        assert all(low <= mere < high for mere in entry.mere.values()), shape
        assert dispatch.choose_experts(shape.recipe, 1408, 1408, 54, shape.rows) is not None
