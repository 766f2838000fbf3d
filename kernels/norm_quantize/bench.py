"""Residual + RMSNorm + quantization in one pass, against the same chain under torch.compile; a sweep of row tilings.

python -m loka_serve.kernels.norm_quantize.bench prints the sweep, on which `quantize.tilings` rests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..benchmarking import (
    D_MODEL,
    ROW_COUNTS,
    KernelRow,
    compiled,
    copies_beyond_l2,
    dequantized,
    make_row,
    print_sweep,
    relative_error,
    scale_bytes,
    time_us,
)
from . import reference
from . import triton as fused

EPS = 1e-6
Inputs = list[tuple[Tensor, Tensor | None, Tensor, float, bool]]


@dataclass(frozen=True)
class Variant:
    """What goes in besides the rows, and what comes out."""

    block_scales: bool
    residual: bool
    both: bool = False

    def __str__(self) -> str:
        kind = "block scales" if self.block_scales else "row scales"
        return kind + (", residual" if self.residual else "") + (", BF16 too" if self.both else "")

    @property
    def ours(self) -> Callable[..., tuple[Tensor, ...]]:
        return fused.residual_norm_both if self.both else fused.residual_norm_quantize

    @property
    def expected(self) -> Callable[..., tuple[Tensor, ...]]:
        return reference.residual_norm_both if self.both else reference.residual_norm_quantize

    def traffic(self, rows: int) -> int:
        """Bytes read and written: the rows and their codes, the residual and the sum, the norm itself."""
        of_a_value = 3 + (4 if self.residual else 0) + (2 if self.both else 0)
        return rows * D_MODEL * of_a_value + scale_bytes(rows, D_MODEL, self.block_scales)


VARIANTS = (
    Variant(block_scales=False, residual=False),
    Variant(block_scales=False, residual=True),
    Variant(block_scales=True, residual=True),
    Variant(block_scales=True, residual=True, both=True),
)
SWEPT_ROWS = (512, 4096, 16384)


def rows() -> Iterator[KernelRow]:
    """Each variant at each row count."""
    for variant in VARIANTS:
        baseline = compiled(variant.expected)
        for row_count in ROW_COUNTS:
            inputs = make_inputs(row_count, variant)
            *_, codes, scale = variant.ours(*inputs[0])
            *_, expected_codes, expected_scale = variant.expected(*inputs[0])
            error = relative_error(dequantized(codes, scale), dequantized(expected_codes, expected_scale))
            beside = ("torch.compile", time_us(baseline, inputs))
            shape = f"{row_count} x {D_MODEL}, {variant}"
            us = time_us(variant.ours, inputs)
            yield make_row("norm_quantize", shape, us, 0, variant.traffic(row_count), beside, error)


def make_inputs(row_count: int, variant: Variant) -> Inputs:
    """Sets of arguments that together exceed the L2 cache."""
    copies = copies_beyond_l2(row_count * D_MODEL * 2 * (2 if variant.residual else 1))
    inputs: Inputs = []
    for seed in range(copies):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        x, residual = torch.randn(2, row_count, D_MODEL, device="cuda", generator=generator).bfloat16().unbind(0)
        gain = torch.rand(D_MODEL, device="cuda", generator=generator) + 0.5
        inputs.append((x, residual if variant.residual else None, gain, EPS, variant.block_scales))
    return inputs


def sweep() -> None:
    """Print the time of every row tiling for each variant, as JSON lines."""
    for row_count in SWEPT_ROWS:
        for variant in VARIANTS:
            inputs = make_inputs(row_count, variant)
            shape = f"{row_count} x {D_MODEL}, {variant}"
            traffic = variant.traffic(row_count)
            print_sweep("norm_quantize", shape, row_count, D_MODEL, traffic, variant.ours, inputs)


if __name__ == "__main__":
    sweep()
