"""Combination, alone and with the next norm, against its reference: in Triton's interpreter or on the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.moe import reference
from loka_serve.kernels.norm_quantize import reference as norm_reference
from tests.kernels.devices import DEVICE, assert_codes_close, compile_for_hopper, needs_triton
from tests.kernels.moe.cases import make_rows

pytestmark = needs_triton


def slots_of(tokens: int, width: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs with NaN in the rows that no slot names, as in padding; positions and weights."""
    generator = torch.Generator().manual_seed(width)
    outputs = make_rows(2 * tokens * slots, width, DEVICE)
    positions = torch.randperm(len(outputs), generator=generator)[: tokens * slots].to(DEVICE)
    named = outputs[positions]
    outputs.fill_(math.nan)
    outputs[positions] = named
    return outputs, positions.view(tokens, slots).int(), torch.rand(tokens, slots, generator=generator).to(DEVICE)


@pytest.mark.parametrize(("tokens", "width", "slots"), [(1, 128, 1), (7, 192, 3), (5, 1408, 4), (3, 65, 2)])
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_combine(tokens: int, width: int, slots: int, with_shared: bool, with_residual: bool) -> None:
    from loka_serve.kernels.moe.combine import combine, combine_norm_quantize

    inputs = slots_of(tokens, width, slots)
    shared = make_rows(tokens, width, DEVICE, seed=1) if with_shared else None
    residual = make_rows(tokens, width, DEVICE, seed=2) if with_residual else None
    out = combine(*inputs, shared, residual)
    # One rounding to bfloat16 of float32 sums that may differ in their last bit.
    torch.testing.assert_close(out, reference.combine(*inputs, shared, residual), rtol=2**-7, atol=1e-5)
    gain = torch.linspace(0.5, 1.5, width, device=DEVICE)
    for scales in (0, 1, 2):
        total, normed, scale = combine_norm_quantize(*inputs, gain, 1e-6, scales, shared, residual)
        assert torch.equal(total, out)
        if scales == 0:
            _, expected = norm_reference.residual_norm(total, None, gain, 1e-6)
            torch.testing.assert_close(normed, expected, rtol=2**-7, atol=1e-6)
        else:
            _, codes, expected_scale = norm_reference.residual_norm_quantize(total, None, gain, 1e-6, scales == 2)
            # The mean square is summed in another order: one bfloat16 step (2**-8) of the row's largest value.
            torch.testing.assert_close(scale, expected_scale, rtol=2**-7, atol=0)
            assert_codes_close(normed, codes)


def test_no_tokens_and_wrong_arguments() -> None:
    from loka_serve.kernels.moe.combine import combine

    outputs, positions, weights = slots_of(2, 64, 2)
    assert combine(outputs, positions[:0], weights[:0]).shape == (0, 64)
    with pytest.raises(ValueError, match=r"residual: expected contiguous bfloat16 \[2, 64\]"):
        combine(outputs, positions, weights, residual=torch.zeros(2, 64, device=DEVICE))
    with pytest.raises(ValueError, match="outputs"):
        combine(outputs.float(), positions, weights)


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.moe.combine import combine_kernel

    bf16 = dict.fromkeys(("output_ptr", "shared_ptr", "residual_ptr", "total_ptr"), "*bf16")
    floats = dict.fromkeys(("slot_weight_ptr", "gain_ptr", "scale_ptr"), "*fp32")
    strides = dict.fromkeys(("scale_row_stride", "scale_block_stride"), "i32")
    switches = {"HAS_SHARED": True, "HAS_RESIDUAL": True, "WIDTH": 1408, "BLOCKS": 16, "SLOTS": 4}
    compile_for_hopper(
        combine_kernel,
        signature={**bf16, **floats, **strides, "position_ptr": "*i32", "eps": "fp32"},
        configurations=[
            {**switches, "NORM": norm, "SCALES": scales, "normed_ptr": normed}
            for norm, scales, normed in ((False, 0, "*bf16"), (True, 1, "*fp8e4nv"), (True, 2, "*fp8e4nv"))
        ],
    )
