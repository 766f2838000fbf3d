"""Recipes: error on Gaussian data, agreement with the kernels' references, shapes, dtypes and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka_serve.errors import QuantizationError
from loka_serve.kernels.grouped_linear import reference as grouped_reference
from loka_serve.kernels.linear import reference as linear_reference
from loka_serve.kernels.quantize.reference import (
    quantize_row_blocks_e4m3,
    quantize_rows_e4m3,
    quantize_rows_int8,
    quantize_static_e4m3,
)
from loka_serve.probe.errors import output_error
from loka_serve.quantization.plan import RECIPE_NAMES
from loka_serve.quantization.recipes import RECIPES, State, recipe_by_name

NAMES = list(RECIPES)
OFFSETS = torch.tensor([0, 4, 4, 9, 16])


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantize(name: str, weight: Tensor, inputs: Tensor) -> State:
    return RECIPES[name].quantize_weight(weight, inputs.abs().max().item())


def test_the_registry_is_what_plans_may_name() -> None:
    assert set(RECIPES) == set(RECIPE_NAMES)
    assert all(recipe.name == name for name, recipe in RECIPES.items())
    with pytest.raises(QuantizationError, match="unknown recipe 'fp4': expected one of bf16, "):
        recipe_by_name("fp4")


# E4M3 keeps 3 mantissa bits: a rounding error spread evenly over a step of 1/16 to 1/8 gives about .026 relative RMS a
# factor, sqrt(2) * .026 = .037 a product, and sums keep that ratio. Scales that cover fewer values do a little better
# and sampling noise over 512 x 512 outputs is below 1 %, hence 3 %. bfloat16 has 7 mantissa bits: 1/16 of that. INT8's
# steps are even, so its error grows with amax / RMS of a row: bounded, not pinned.
FROBENIUS = {"fp8_tensor": 0.037, "fp8_row": 0.037, "fp8_block": 0.037, "bf16": 0.037 / 16}
FLOORED_MERE = {"fp8_tensor": 0.079, "fp8_row": 0.079, "fp8_block": 0.079, "bf16": 0.005}


@pytest.mark.parametrize("width", [256, 1408])
@pytest.mark.parametrize("name", NAMES)
def test_error_on_gaussian_data(name: str, width: int) -> None:
    inputs, weight = gaussian(512, width), gaussian(512, width, seed=1) * width**-0.5
    method = RECIPES[name].prepare(quantize(name, weight, inputs))
    error = output_error(method(inputs), inputs @ weight.T)
    if name == "int8_row":
        assert 0.005 < error.relative_frobenius < 0.02
        return
    assert error.relative_frobenius == pytest.approx(FROBENIUS[name], rel=0.03)
    assert error.floored_mere == pytest.approx(FLOORED_MERE[name], rel=0.03)


def reference_output(name: str, inputs: Tensor, state: State, offsets: Tensor | None) -> Tensor:
    """The same product from the codes, through the kernels' references."""
    module = linear_reference if offsets is None else grouped_reference
    prefix = "linear_" if offsets is None else "grouped_linear_"
    tail = () if offsets is None else (offsets,)
    if name == "bf16":
        return getattr(module, prefix + "bf16")(inputs, state["weight"], *tail)
    if name == "fp8_tensor":
        operands = (quantize_static_e4m3(inputs, state["input_scale"]), state["input_scale"])
    elif name == "fp8_row":
        operands = quantize_rows_e4m3(inputs)
    elif name == "fp8_block":
        operands = quantize_row_blocks_e4m3(inputs)
    else:
        operands = quantize_rows_int8(inputs)
    kernel = {"fp8_block": "block_scaled", "int8_row": "row_scaled_int8"}.get(name, "row_scaled")
    return getattr(module, prefix + kernel)(*operands, state["weight"], state["weight_scale"], *tail)


@pytest.mark.parametrize("cache_weight", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_kernels_reference(name: str, cache_weight: bool) -> None:
    inputs, weight = gaussian(16, 300), gaussian(133, 300, seed=1)  # neither width a multiple of 128 or 16
    state = quantize(name, weight, inputs)
    output = RECIPES[name].prepare(state, cache_weight=cache_weight)(inputs)
    # The same exact products in float32, scaled before instead of after the sum.
    torch.testing.assert_close(output, reference_output(name, inputs, state, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_weight", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_grouped_equals_the_kernels_reference_and_one_product_a_group(name: str, cache_weight: bool) -> None:
    inputs, weight = gaussian(16, 150), gaussian(4, 70, 150, seed=1)
    recipe = RECIPES[name]
    state = quantize(name, weight, inputs)
    output = recipe.prepare(state, cache_weight=cache_weight)(inputs, OFFSETS)
    torch.testing.assert_close(output, reference_output(name, inputs, state, OFFSETS), rtol=1e-4, atol=1e-4)
    for group, (start, end) in enumerate(zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True)):
        alone = recipe.prepare(quantize(name, weight[group], inputs))(inputs[start:end])
        torch.testing.assert_close(output[start:end], alone, rtol=1e-6, atol=1e-6)  # another GEMM, another order


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(64, 128), (65, 129), (1, 1), (3, 130, 257)])
def test_state_shapes_tell_what_quantize_weight_gives(name: str, shape: tuple[int, ...]) -> None:
    state = RECIPES[name].quantize_weight(gaussian(*shape), 1.0)
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state.items()} == RECIPES[name].state_shapes(
        shape
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_has_the_inputs_dtype_and_leading_dimensions(name: str, dtype: torch.dtype) -> None:
    inputs, weight = gaussian(2, 3, 5, 32).to(dtype), gaussian(8, 32, seed=1)
    method = RECIPES[name].prepare(quantize(name, weight, inputs))
    output = method(inputs)
    assert output.shape == (2, 3, 5, 8) and output.dtype == dtype
    assert torch.equal(output[1, 2], method(inputs[1, 2]))
    assert method(inputs[:0]).shape == (0, 3, 5, 8)
    assert method.backend == "dequantized float32"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_weight_is_refused(name: str, bad: float) -> None:
    weight = gaussian(4, 8)
    weight[2, 3] = bad
    with pytest.raises(QuantizationError, match="the weight holds NaN or infinity"):
        RECIPES[name].quantize_weight(weight, 1.0)


@pytest.mark.parametrize("amax", [None, math.nan, math.inf, -1.0])
def test_fp8_tensor_needs_a_calibrated_amax(amax: float | None) -> None:
    with pytest.raises(QuantizationError, match="fp8_tensor needs the calibrated input amax"):
        RECIPES["fp8_tensor"].quantize_weight(gaussian(4, 8), amax)


def test_fp8_tensor_saturates_beyond_the_calibrated_amax() -> None:
    weight = torch.eye(4)
    method = RECIPES["fp8_tensor"].prepare(RECIPES["fp8_tensor"].quantize_weight(weight, 2.0))
    # Powers of two times the scale are exact, so only saturation changes the values.
    torch.testing.assert_close(method(torch.tensor([[1.0, -2.0, 5.0, -9.0]])), torch.tensor([[1.0, -2.0, 2.0, -2.0]]))


@pytest.mark.parametrize("name", NAMES)
def test_nan_reaches_the_outputs_of_its_row_only(name: str) -> None:
    inputs, weight = gaussian(3, 32), gaussian(8, 32, seed=1)
    state = quantize(name, weight, inputs)
    inputs[1, 5] = math.nan
    output = RECIPES[name].prepare(state)(inputs)
    assert output[1].isnan().all() and output[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_inputs_and_weights_give_zero(name: str) -> None:
    method = RECIPES[name].prepare(RECIPES[name].quantize_weight(torch.zeros(4, 200), 0.0))
    assert torch.equal(method(torch.zeros(2, 200)), torch.zeros(2, 4))


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_block", "int8_row"])
def test_eight_bit_weights_take_half_of_bfloat16(name: str) -> None:
    state = RECIPES[name].quantize_weight(gaussian(2, 256, 256), 1.0)
    assert 0.5 <= sum(tensor.nbytes for tensor in state.values()) / (2 * 2 * 256 * 256) <= 0.51


def test_without_the_cache_only_the_codes_stay() -> None:
    state = RECIPES["fp8_row"].quantize_weight(gaussian(64, 64))
    assert RECIPES["fp8_row"].prepare(state, cache_weight=False).state["weight"].dtype == torch.float8_e4m3fn
    assert "weight" not in RECIPES["fp8_row"].prepare(state, cache_weight=True).state
