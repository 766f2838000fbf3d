"""The standalone kernel equals its reference bit for bit: in the interpreter, on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3
from loka_serve.kernels.quantize.tilings import RowTiling
from tests.kernels.devices import DEVICE, compile_for_hopper, needs_triton

pytestmark = needs_triton


def activation(rows: int, width: int) -> Tensor:
    """Rows of very different size, with outlier channels."""
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randn(rows, width, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    x[:, :: max(width // 3, 1)] *= 50
    return x.bfloat16().to(DEVICE)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    return torch.equal(found.float().nan_to_num(nan=1e30), expected.float().nan_to_num(nan=1e30))


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 192), (5, 1408), (2, 65), (9, 300)])
@pytest.mark.parametrize("tiling", [None, RowTiling(4, 2)])
@pytest.mark.parametrize("block_scales", [False, True])
def test_equals_reference_bit_for_bit(rows: int, width: int, tiling: RowTiling | None, block_scales: bool) -> None:
    from loka_serve.kernels.quantize.triton import BLOCK_SCALES, ROW_SCALES, quantize_activation

    x = activation(rows, width)
    codes, scale = quantize_activation(x, BLOCK_SCALES if block_scales else ROW_SCALES, tiling)
    expected_codes, expected_scale = (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(x)
    assert same(codes, expected_codes) and same(scale, expected_scale)
    if block_scales:
        assert scale.stride(0) == 1 and scale.stride(1) % 4 == 0


@pytest.mark.parametrize("block_scales", [False, True])
def test_zeros_infinities_and_nan(block_scales: bool) -> None:
    from loka_serve.kernels.quantize.triton import BLOCK_SCALES, ROW_SCALES, quantize_activation

    x = activation(5, 256)
    x[1] = 0
    x[2, 7], x[3, 200], x[4, 3] = float("nan"), float("-inf"), -0.0
    codes, scale = quantize_activation(x, BLOCK_SCALES if block_scales else ROW_SCALES)
    expected_codes, expected_scale = (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(x)
    assert same(codes, expected_codes) and same(scale, expected_scale)
    assert expected_codes[2].float().isnan().any() and expected_scale[2].isnan().any()


def test_other_forms_and_wrong_inputs() -> None:
    from loka_serve.kernels.quantize.triton import NO_SCALES, ROW_SCALES, quantize_activation

    x = activation(3, 64)
    unchanged, none = quantize_activation(x, NO_SCALES)
    assert unchanged is x and none.numel() == 0
    assert quantize_activation(x[:0], ROW_SCALES)[0].shape == (0, 64)
    for wrong in (x.float(), x.T, x[0]):
        with pytest.raises(ValueError, match="x: expected contiguous bfloat16"):
            quantize_activation(wrong, ROW_SCALES)


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.quantize.triton import quantize_kernel

    numbers = dict.fromkeys(("scale_row_stride", "scale_block_stride", "rows"), "i32")
    compile_for_hopper(
        quantize_kernel,
        signature={"x_ptr": "*bf16", "out_ptr": "*fp8e4nv", "scale_ptr": "*fp32", **numbers},
        configurations=[
            {"WIDTH": width, "BLOCKS": blocks, "ROWS": rows, "SCALES": scales}
            for width, blocks in ((1408, 16), (5888, 64))
            for rows, scales in ((1, 1), (4, 2))
        ],
        num_warps=8,
    )
