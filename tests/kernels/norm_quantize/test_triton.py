"""The fused kernel against its reference: in Triton's interpreter without a GPU, on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from loka_serve.kernels.norm_quantize import reference
from loka_serve.kernels.quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3
from loka_serve.kernels.quantize.tilings import RowTiling, row_tiling
from tests.kernels.devices import DEVICE, assert_codes_close, compile_for_hopper, needs_triton

pytestmark = needs_triton


def inputs(rows: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, width, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    # Outlier channels, so that scales differ between blocks.
    x[:, :: max(width // 3, 1)] *= 50
    return x, residual, (torch.rand(width, generator=generator) + 0.5).to(DEVICE)


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 192), (5, 1408), (2, 65), (2, 576)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("block_scales", [False, True])
@pytest.mark.parametrize("block_norm", [False, True])
def test_equals_reference(rows: int, width: int, with_residual: bool, block_scales: bool, block_norm: bool) -> None:
    from loka_serve.kernels.norm_quantize import triton as fused

    x, residual, full_gain = inputs(rows, width, seed=rows * width)
    gain = None if block_norm else full_gain
    added = residual if with_residual else None
    expected = reference.residual_norm_quantize(x, added, gain, 1e-6, block_scales)
    total, codes, scale = fused.residual_norm_quantize(x, added, gain, 1e-6, block_scales)
    assert torch.equal(total, expected[0])
    # The mean square is summed in another order: one bfloat16 step (2**-8) of the row's largest value.
    torch.testing.assert_close(scale, expected[2], rtol=2**-7, atol=0)
    assert_codes_close(codes, expected[1])
    _, normed = fused.residual_norm(x, added, gain, 1e-6)
    torch.testing.assert_close(normed, reference.residual_norm(x, added, gain, 1e-6)[1], rtol=2**-7, atol=1e-6)


def test_block_norm_keeps_an_outlier_in_its_block() -> None:
    from loka_serve.kernels.norm_quantize import triton as fused

    x, _, _ = inputs(3, 640, seed=3)
    _, plain = fused.residual_norm(x, None, None, 1e-6)
    x[:, 300] = 1e4
    _, normed = fused.residual_norm(x, None, None, 1e-6)
    others = [*range(256), *range(512, 640)]
    assert torch.equal(normed[:, others], plain[:, others])
    # Alone in its block of 256, the outlier becomes sqrt(256); one bfloat16 step of 16 is 1/8.
    assert ((normed[:, 300].float() - 16).abs() <= 0.125).all()


@pytest.mark.parametrize("block_scales", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_both_forms_in_one_pass(rows: int, block_scales: bool) -> None:
    from loka_serve.kernels.norm_quantize import triton as fused

    x, residual, gain = inputs(rows, 192, seed=rows)
    for added in (None, residual):
        total, normed, codes, scale = fused.residual_norm_both(x, added, gain, 1e-6, block_scales)
        apart = fused.residual_norm_quantize(x, added, gain, 1e-6, block_scales)
        for found, expected in zip((total, codes, scale), apart, strict=True):
            assert torch.equal(found.float(), expected.float())
        assert torch.equal(normed, fused.residual_norm(x, added, gain, 1e-6)[1])
        # The codes are those of the norm as it is stored, bit for bit.
        expected_codes, expected_scale = (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(normed)
        assert torch.equal(codes.float(), expected_codes.float()) and torch.equal(scale, expected_scale)
        expected = reference.residual_norm_both(x, added, gain, 1e-6, block_scales)
        assert torch.equal(total, expected[0])
        torch.testing.assert_close(normed, expected[1], rtol=2**-7, atol=1e-6)
        assert_codes_close(codes, expected[2])


@pytest.mark.parametrize("tiling", [RowTiling(2, 2), RowTiling(4, 4), RowTiling(8, 1)])
def test_tilings_change_no_row(tiling: RowTiling) -> None:
    from loka_serve.kernels.norm_quantize import triton as fused

    x, residual, gain = inputs(5, 192, seed=0)
    for found, expected in zip(
        fused.residual_norm_both(x, residual, gain, 1e-6, True, tiling),
        fused.residual_norm_both(x, residual, gain, 1e-6, True, RowTiling(1, 4)),
        strict=True,
    ):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-3, atol=2**-9)
    assert row_tiling(1, 1408).warps == row_tiling(16384, 1408).warps


def test_zero_rows_and_a_poisoned_row() -> None:
    from loka_serve.kernels.norm_quantize import triton as fused

    x, _, gain = inputs(4, 256, seed=1)
    x[1] = 0
    x[2, 7] = float("nan")
    _, codes, scale = fused.residual_norm_quantize(x, None, gain, 1e-6, True)
    assert (codes[1].float() == 0).all() and torch.isfinite(scale[1]).all()
    assert codes[2].float().isnan().all() and scale[2].isnan().all(), "a poisoned row must not come out as numbers"
    assert codes[[0, 3]].float().isfinite().all()
    assert fused.residual_norm_quantize(x[:0], None, gain, 1e-6, False)[1].shape == (0, 256)
    with pytest.raises(ValueError, match="x: expected contiguous bfloat16"):
        fused.residual_norm_quantize(x.float(), None, gain, 1e-6, False)
    with pytest.raises(ValueError, match="gain"):
        fused.residual_norm_quantize(x, None, gain[:9], 1e-6, False)
    with pytest.raises(ValueError, match="residual"):
        fused.residual_norm_quantize(x, x[:2], gain, 1e-6, False)


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.norm_quantize.triton import residual_norm_kernel

    bf16 = dict.fromkeys(("x_ptr", "residual_ptr", "total_ptr", "normed_ptr", "out_ptr"), "*bf16")
    strides = dict.fromkeys(("scale_row_stride", "scale_block_stride"), "i32")
    compile_for_hopper(
        residual_norm_kernel,
        signature={**bf16, **strides, "gain_ptr": "*fp32", "scale_ptr": "*fp32", "eps": "fp32", "rows": "i32"},
        configurations=[
            {"WIDTH": width, "BLOCKS": 16, "ROWS": rows, "HAS_RESIDUAL": True, "BOTH": rows > 1}
            | {"BLOCK_NORM": block_norm, "SCALES": scales, "out_ptr": out}
            for width, rows, block_norm in ((1408, 4, False), (1792, 1, False), (1408, 4, True))
            for scales, out in ((0, "*bf16"), (1, "*fp8e4nv"), (2, "*fp8e4nv"))
        ],
    )
