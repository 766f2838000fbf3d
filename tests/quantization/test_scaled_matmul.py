"""torch's scaled GEMM as a site method; the grouped one and the tensor cores are in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from loka_serve.quantization.methods import SiteMethod
from loka_serve.quantization.recipes import RECIPES
from loka_serve.quantization.scaled_matmul import ScaledMatmulMethod, supports_scaled_matmul


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differs_from_the_portable_method_by_its_bfloat16_result(name: str, dtype: torch.dtype) -> None:
    """torch emulates the operation on a CPU, which checks the layout of operands and scales."""
    recipe, inputs = RECIPES[name], gaussian(3, 7, 272).to(dtype)
    state = recipe.quantize_weight(gaussian(48, 272, seed=1) / 16, 5.0)
    method = ScaledMatmulMethod(recipe, state)
    output, expected = method(inputs), SiteMethod(recipe, state, cache_weight=True)(inputs.float())
    assert output.shape == (3, 7, 48) and output.dtype == dtype and method.backend == "torch._scaled_mm"
    # bfloat16 has 8 bits of mantissa: half a step is 2**-9 of the value.
    torch.testing.assert_close(output.float(), expected, rtol=2**-8, atol=2**-8)
    assert method(inputs[:0]).shape == (0, 7, 48)


@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor"])
def test_grouped_operands_have_the_layout_that_torch_checks(name: str) -> None:
    recipe = RECIPES[name]
    state = recipe.quantize_weight(gaussian(4, 64, 256), 5.0)
    method = ScaledMatmulMethod(recipe, {key: tensor.to("meta") for key, tensor in state.items()})
    output = method(torch.empty(100, 256, device="meta"), torch.empty(5, dtype=torch.int64, device="meta"))
    assert output.shape == (100, 64) and output.dtype == torch.float32
    assert method.backend == "torch._scaled_grouped_mm"


def test_never_chosen_without_a_cuda_device() -> None:
    assert not supports_scaled_matmul("fp8_row", torch.empty(64, 64))
    state = RECIPES["fp8_row"].quantize_weight(gaussian(64, 64))
    assert type(RECIPES["fp8_row"].prepare(state)) is SiteMethod
