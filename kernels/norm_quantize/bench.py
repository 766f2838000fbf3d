"""Residual + RMSNorm + quantization in one pass, against the same chain under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..benchmarking import KernelRow, copies_beyond_l2, make_row, time_us
from . import reference
from . import triton as fused

ROWS = (1, 8, 64, 512, 4096, 16384)
WIDTH = 1408
EPS = 1e-6


def rows() -> Iterator[KernelRow]:
    """Row and block scales, with and without a residual, at each row count."""
    for row_count in ROWS:
        for block_scales in (False, True):
            for with_residual in (False, True):
                yield _row(row_count, block_scales, with_residual)


def _row(row_count: int, block_scales: bool, with_residual: bool) -> KernelRow:
    copies = copies_beyond_l2(row_count * WIDTH * 2 * (2 if with_residual else 1))
    inputs = []
    for seed in range(copies):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        x, residual = torch.randn(2, row_count, WIDTH, device="cuda", generator=generator).bfloat16()
        gain = torch.rand(WIDTH, device="cuda", generator=generator) + 0.5
        inputs.append((x.contiguous(), residual.contiguous() if with_residual else None, gain))

    def ours(x: Tensor, residual: Tensor | None, gain: Tensor) -> tuple[Tensor, ...]:
        return fused.residual_norm_quantize(x, residual, gain, EPS, block_scales)

    compiled = torch.compile(reference.residual_norm_quantize)

    def baseline(x: Tensor, residual: Tensor | None, gain: Tensor) -> tuple[Tensor, ...]:
        return compiled(x, residual, gain, EPS, block_scales)

    _, codes, scale = ours(*inputs[0])
    total, expected_codes, expected_scale = reference.residual_norm_quantize(*inputs[0], EPS, block_scales)
    error = _relative_error(_values(codes, scale), _values(expected_codes, expected_scale))
    scales = row_count * (4 * (WIDTH // 128) if block_scales else 4)
    traffic = row_count * WIDTH * (3 + (4 if with_residual else 0)) + scales
    kind = ("block" if block_scales else "row") + (" scales, residual" if with_residual else " scales")
    us = time_us(ours, inputs)
    baseline_us = time_us(baseline, inputs)
    shape = f"{row_count} x {WIDTH}, {kind}"
    return make_row("norm_quantize", shape, us, 0, traffic, ("torch.compile", baseline_us), error)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    wide = scale[:, None] if scale.ndim == 1 else scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.float() * wide


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
