"""Reference GEMMs of quantized codes against sums written out in float64."""

from __future__ import annotations

import torch

from loka_serve.kernels.linear.reference import (
    linear_bf16,
    linear_block_scaled,
    linear_row_scaled,
    linear_row_scaled_int8,
)
from loka_serve.kernels.quantize.reference import (
    expand_row_blocks,
    expand_tiles,
    quantize_row_blocks_e4m3,
    quantize_rows_e4m3,
    quantize_rows_int8,
    quantize_static_e4m3,
    quantize_tiles_e4m3,
    static_scale_e4m3,
)

# Float32 sums of up to 300 exact products against float64: K * 2**-24 of the summed magnitudes at worst, far less here.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def operands(rows: int = 5, outputs: int = 140, width: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=generator), torch.randn(outputs, width, generator=generator)


def test_bf16_rounds_both_operands_and_sums_in_float32() -> None:
    x, weight = operands()
    expected = x.bfloat16().double() @ weight.bfloat16().double().T
    torch.testing.assert_close(linear_bf16(x, weight).double(), expected, **TOLERANCE)
    # 1 + 2**-9 is 1 in bfloat16, and the sum of 257 ones (which bfloat16 would give as 256) is exact.
    assert linear_bf16(torch.full((1, 257), 1 + 2.0**-9), torch.ones(1, 257)).item() == 257.0


def test_row_scaled_codes() -> None:
    x, weight = operands()
    codes, scale = quantize_rows_e4m3(x)
    weight_codes, weight_scale = quantize_rows_e4m3(weight)
    expected = (codes.double() * scale.double()[:, None]) @ (weight_codes.double() * weight_scale.double()[:, None]).T
    torch.testing.assert_close(
        linear_row_scaled(codes, scale, weight_codes, weight_scale).double(), expected, **TOLERANCE
    )


def test_a_scalar_activation_scale() -> None:
    x, weight = operands()
    scale = static_scale_e4m3(x.abs().max().item())
    codes = quantize_static_e4m3(x, scale)
    weight_codes, weight_scale = quantize_rows_e4m3(weight)
    repeated = scale.expand(len(x))
    assert torch.equal(
        linear_row_scaled(codes, scale, weight_codes, weight_scale),
        linear_row_scaled(codes, repeated, weight_codes, weight_scale),
    )


def test_int8_sums_are_exact() -> None:
    x, weight = operands(width=4224)
    codes, scale = quantize_rows_int8(x)
    weight_codes, weight_scale = quantize_rows_int8(weight)
    sums = codes.long() @ weight_codes.long().T
    expected = sums.float() * scale[:, None] * weight_scale
    assert torch.equal(linear_row_scaled_int8(codes, scale, weight_codes, weight_scale), expected)


def test_block_scaled_codes_with_edge_blocks() -> None:
    x, weight = operands()
    codes, scale = quantize_row_blocks_e4m3(x)
    weight_codes, weight_scale = quantize_tiles_e4m3(weight)
    inputs = codes.double() * expand_row_blocks(scale, 300).double()
    weights = weight_codes.double() * expand_tiles(weight_scale, 140, 300).double()
    torch.testing.assert_close(
        linear_block_scaled(codes, scale, weight_codes, weight_scale).double(), inputs @ weights.T, **TOLERANCE
    )
