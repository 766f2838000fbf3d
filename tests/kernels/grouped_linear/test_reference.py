"""Grouped reference GEMMs equal one GEMM a group, empty groups included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.grouped_linear import reference as grouped
from loka_serve.kernels.linear import reference as linear
from loka_serve.kernels.quantize.reference import (
    quantize_row_blocks_e4m3,
    quantize_rows_e4m3,
    quantize_rows_int8,
    quantize_tiles_e4m3,
)

OFFSETS = torch.tensor([0, 3, 3, 10, 11])
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(11, 150, generator=generator), torch.randn(4, 20, 150, generator=generator)


@pytest.mark.parametrize(
    ("name", "quantize_inputs", "quantize_weight"),
    [
        ("row_scaled", quantize_rows_e4m3, quantize_rows_e4m3),
        ("row_scaled_int8", quantize_rows_int8, quantize_rows_int8),
        ("block_scaled", quantize_row_blocks_e4m3, quantize_tiles_e4m3),
    ],
)
def test_equals_one_product_a_group(name: str, quantize_inputs: Quantize, quantize_weight: Quantize) -> None:
    x, weight = operands()
    codes, scale = quantize_inputs(x)
    weight_codes, weight_scale = quantize_weight(weight)
    output = getattr(grouped, f"grouped_linear_{name}")(codes, scale, weight_codes, weight_scale, OFFSETS)
    assert output.shape == (11, 20) and output.dtype == torch.float32
    one = getattr(linear, f"linear_{name}")
    for group, (start, end) in enumerate(zip(OFFSETS[:-1], OFFSETS[1:], strict=True)):
        rows = slice(start, end)
        expected = one(codes[rows], scale[rows], weight_codes[group], weight_scale[group])
        assert torch.equal(output[rows], expected)


def test_bf16_equals_one_product_a_group() -> None:
    x, weight = operands()
    output = grouped.grouped_linear_bf16(x, weight, OFFSETS)
    assert torch.equal(output[:3], linear.linear_bf16(x[:3], weight[0]))
    assert torch.equal(output[3:10], linear.linear_bf16(x[3:10], weight[2]))
    assert torch.equal(output[10:], linear.linear_bf16(x[10:], weight[3]))


def test_scalar_scale_and_no_rows() -> None:
    x, weight = operands()
    codes, _ = quantize_rows_e4m3(x)
    weight_codes, weight_scale = quantize_rows_e4m3(weight)
    scale = torch.tensor(0.5)
    output = grouped.grouped_linear_row_scaled(codes, scale, weight_codes, weight_scale, OFFSETS)
    assert torch.equal(
        output[:3], linear.linear_row_scaled(codes[:3], scale.expand(3), weight_codes[0], weight_scale[0])
    )
    nothing = torch.zeros(5, dtype=torch.int64)
    assert grouped.grouped_linear_bf16(x[:0], weight, nothing).shape == (0, 20)
