"""The function over all implementations: checks, choices without a GPU, layouts."""

from __future__ import annotations

import math

import pytest
import torch

from loka_serve.kernels.linear import reference
from loka_serve.kernels.linear.implementations import (
    RECIPES,
    default_implementation,
    implementations_for,
    linear,
    recipe_of,
)
from loka_serve.kernels.linear.libraries import _whole_padded_rows
from loka_serve.kernels.linear.workload import ERROR_LIMITS, largest_row_error, make_operands


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_reference_runs_anywhere(recipe: str, out_dtype: torch.dtype) -> None:
    operands = make_operands(recipe, 3, 136, 144, "cpu")
    assert implementations_for(recipe, 3, 136, 144, "cpu") == ("reference",)
    name = default_implementation(recipe, 3, 136, 144, "cpu")
    expected = reference.linear(*operands)
    out = linear(*operands, name, out_dtype)
    assert torch.equal(out, expected.to(out_dtype))
    assert recipe_of(operands[1]) == recipe
    assert largest_row_error(out, expected) < ERROR_LIMITS[recipe]


def test_the_check_sees_one_wrong_row_and_nan() -> None:
    expected = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[7, 3] += 0.1 * expected[7].norm()
    assert largest_row_error(found, expected) == pytest.approx(0.1, rel=1e-3)
    found[9, 1] = math.nan
    assert largest_row_error(found, expected) == math.inf


def test_scales_of_a_weight_as_cublas_reads_them() -> None:
    weight_scale = torch.arange(33, dtype=torch.float32).reshape(3, 11)
    whole = _whole_padded_rows(weight_scale)
    assert whole.shape == (12, 3) and whole.stride() == (1, 12)
    assert torch.equal(whole[:11], weight_scale.T) and (whole[11] == 0).all()
    four = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    assert _whole_padded_rows(four).data_ptr() == four.data_ptr()


def test_wrong_arguments_are_named() -> None:
    x, scale, weight, weight_scale = make_operands("fp8_row", 3, 32, 64, "cpu")
    with pytest.raises(ValueError, match="recipe: expected one of bf16"):
        implementations_for("int4", 3, 32, 64, "cpu")
    with pytest.raises(ValueError, match="recipe: expected one of bf16"):
        make_operands("int4", 3, 32, 64, "cpu")
    with pytest.raises(ValueError, match=r"expected \[M, K\] and \[N, K\]"):
        linear(x, scale, weight[:, :32], weight_scale, "reference")
    with pytest.raises(ValueError, match="x: expected contiguous torch.bfloat16"):
        linear(x, None, weight, None, "reference")
    with pytest.raises(ValueError, match="weight: expected contiguous torch.float8_e4m3fn"):
        linear(x, scale, weight.bfloat16(), weight_scale, "reference")
    with pytest.raises(ValueError, match="scale, weight_scale: expected shapes"):
        linear(x, scale, weight, None, "reference")
    with pytest.raises(ValueError, match="scale, weight_scale: expected shapes"):
        linear(x, scale[:2], weight, weight_scale, "reference")  # type: ignore[index]
    with pytest.raises(ValueError, match="out_dtype"):
        linear(x, scale, weight, weight_scale, "reference", torch.float16)
    with pytest.raises(ValueError, match="no 'cutlass' for fp8_row"):
        linear(x, scale, weight, weight_scale, "cutlass")
