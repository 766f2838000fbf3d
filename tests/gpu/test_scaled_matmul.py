"""FP8 sites through torch's scaled GEMMs against the portable method, and when they are used."""

from __future__ import annotations

import pytest
import torch

from loka_serve.quantization.methods import SiteMethod
from loka_serve.quantization.recipes import RECIPES
from loka_serve.quantization.scaled_matmul import ScaledMatmulMethod

OFFSETS = [0, 5, 5, 40, 100]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def skip_below(capability: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"FP8 tensor cores need compute capability {capability}")


# The result is rounded to bfloat16 (8 bits: half a step is 2**-9 of the value), after float32 sums in another order.
TOLERANCE = {"rtol": 2**-8, "atol": 2**-8}


@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor"])
@pytest.mark.parametrize("rows", [0, 1, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(name: str, rows: int, dtype: torch.dtype) -> None:
    skip_below((8, 9))
    recipe, inputs = RECIPES[name], gaussian(rows, 272).to(dtype)
    state = recipe.quantize_weight(gaussian(48, 272, seed=1) / 16, 5.0)
    method = recipe.prepare(state, "cuda")
    assert isinstance(method, ScaledMatmulMethod) and method.backend == "torch._scaled_mm"
    output = method(inputs)
    assert output.dtype == dtype and output.shape == (rows, 48)
    torch.testing.assert_close(output.float(), SiteMethod(recipe, state, True)(inputs.float()), **TOLERANCE)


@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor"])
def test_grouped(name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's grouped FP8 GEMM runs on compute capability 9.0")
    recipe, inputs, offsets = RECIPES[name], gaussian(100, 256), torch.tensor(OFFSETS, device="cuda")
    state = recipe.quantize_weight(gaussian(4, 64, 256, seed=1) / 16, 5.0)
    method = recipe.prepare(state, "cuda")
    assert method.backend == "torch._scaled_grouped_mm"
    expected = SiteMethod(recipe, state, True)(inputs, offsets)
    torch.testing.assert_close(method(inputs, offsets), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "shape"), [("fp8_row", (50, 64)), ("fp8_row", (64, 50)), ("fp8_block", (64, 64)), ("int8_row", (64, 64))]
)
def test_what_the_library_does_not_take_runs_dequantized(name: str, shape: tuple[int, int]) -> None:
    recipe, inputs = RECIPES[name], gaussian(7, shape[1])
    state = recipe.quantize_weight(gaussian(*shape, seed=1), 5.0)
    method = recipe.prepare(state, "cuda")
    assert method.backend == "dequantized float32"
    on_cpu = recipe.prepare({key: tensor.cpu() for key, tensor in state.items()})(inputs.cpu())
    # Float32 on both sides, summed in another order.
    torch.testing.assert_close(method(inputs).cpu(), on_cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(RECIPES))
def test_quantization_gives_the_same_codes_on_both_devices(name: str) -> None:
    weight = gaussian(3, 70, 200)
    on_gpu = RECIPES[name].quantize_weight(weight, 5.0)
    on_cpu = RECIPES[name].quantize_weight(weight.cpu(), 5.0)
    for key, tensor in on_gpu.items():
        assert torch.equal(tensor.cpu().float(), on_cpu[key].float()), key
