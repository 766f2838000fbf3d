"""The fused kernel against its reference: in Triton's interpreter without a GPU, on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from loka_serve.kernels.quantize.tilings import RowTiling
from loka_serve.kernels.swiglu_quantize import reference
from tests.kernels.devices import DEVICE, assert_codes_close, compile_for_hopper, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 192), (4, 1408), (2, 65)])
@pytest.mark.parametrize("block_scales", [False, True])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_equals_reference(rows: int, width: int, block_scales: bool, activation: str) -> None:
    from loka_serve.kernels.swiglu_quantize import triton as fused

    generator = torch.Generator().manual_seed(rows * width)
    gate_up = (torch.randn(rows, 2 * width, generator=generator) * 3).bfloat16().to(DEVICE)
    codes, scale = fused.swiglu_quantize(gate_up, block_scales, activation=activation)
    expected_codes, expected_scale = reference.swiglu_quantize(gate_up, block_scales, activation)
    # exp() of another library: one bfloat16 step (2**-8) of the largest value, twice for the two roundings.
    torch.testing.assert_close(scale, expected_scale, rtol=2**-7, atol=0)
    assert_codes_close(codes, expected_codes)
    found, expected = fused.swiglu(gate_up, activation=activation), reference.swiglu(gate_up, activation)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    tiled_codes, tiled_scale = fused.swiglu_quantize(gate_up, block_scales, RowTiling(4, 4), activation)
    assert torch.equal(tiled_codes.float(), codes.float()) and torch.equal(tiled_scale, scale)


def test_empty_and_wrong_inputs() -> None:
    from loka_serve.kernels.swiglu_quantize import triton as fused

    gate_up = torch.zeros(0, 256, dtype=torch.bfloat16, device=DEVICE)
    assert fused.swiglu_quantize(gate_up, True)[0].shape == (0, 128)
    for wrong in (gate_up.float(), gate_up[:, :255].contiguous()):
        with pytest.raises(ValueError, match="gate_up: expected contiguous bfloat16"):
            fused.swiglu(wrong)
    with pytest.raises(ValueError, match="activation 'gelu': expected one of silu, hard_swish"):
        fused.swiglu(gate_up, activation="gelu")


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_a_poisoned_gate_does_not_come_out_as_a_number(activation: str) -> None:
    from loka_serve.kernels.swiglu_quantize import triton as fused

    gate_up = torch.ones(2, 256, dtype=torch.bfloat16, device=DEVICE)
    gate_up[1, 3] = float("nan")
    out = fused.swiglu(gate_up, activation=activation)
    assert out[1, 3].isnan() and out[0].isfinite().all()


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.swiglu_quantize.triton import swiglu_kernel

    strides = dict.fromkeys(("scale_row_stride", "scale_block_stride", "rows"), "i32")
    compile_for_hopper(
        swiglu_kernel,
        signature={"gate_up_ptr": "*bf16", "scale_ptr": "*fp32", **strides},
        configurations=[
            {"WIDTH": width, "BLOCKS": blocks, "ROWS": rows, "HARD_SWISH": hard_swish}
            | {"SCALES": scales, "out_ptr": out}
            for width, blocks, rows, hard_swish in ((1408, 16, 4, False), (3840, 32, 1, False), (3840, 32, 1, True))
            for scales, out in ((0, "*bf16"), (1, "*fp8e4nv"), (2, "*fp8e4nv"))
        ],
        num_warps=8,
    )
