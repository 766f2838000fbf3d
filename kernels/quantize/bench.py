"""Quantization of an activation on its own, against the reference under torch.compile; a sweep of row tilings.

python -m loka_serve.kernels.quantize.bench prints the sweep.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..benchmarking import (
    D_MODEL,
    ROW_COUNTS,
    KernelRow,
    compiled,
    copies_beyond_l2,
    make_row,
    print_sweep,
    scale_bytes,
    time_us,
)
from .reference import quantize_row_blocks_e4m3, quantize_rows_e4m3
from .triton import BLOCK_SCALES, ROW_SCALES, quantize_activation

FORMS = {
    "row scales": (ROW_SCALES, quantize_rows_e4m3),
    "block scales": (BLOCK_SCALES, quantize_row_blocks_e4m3),
}


def rows() -> Iterator[KernelRow]:
    """Both forms of scales at each row count; the error is the largest difference of codes and scales: 0."""
    for name, (scales, reference) in FORMS.items():
        baseline = compiled(reference)
        for row_count in ROW_COUNTS:
            inputs = make_inputs(row_count, scales)
            found, expected = quantize_activation(*inputs[0]), reference(inputs[0][0])
            error = max(float((a.float() - b.float()).abs().max()) for a, b in zip(found, expected, strict=True))
            us = time_us(quantize_activation, inputs)
            beside = ("torch.compile", time_us(baseline, [(x,) for x, _ in inputs]))
            shape = f"{row_count} x {D_MODEL}, {name}"
            yield make_row("quantize", shape, us, 0, _traffic(row_count, scales), beside, error)


def make_inputs(row_count: int, scales: int) -> list[tuple[Tensor, int]]:
    """Sets of arguments that together exceed the L2 cache."""
    copies = copies_beyond_l2(row_count * D_MODEL * 2)
    return [(torch.randn(row_count, D_MODEL, device="cuda").bfloat16(), scales) for _ in range(copies)]


def _traffic(row_count: int, scales: int) -> int:
    return row_count * D_MODEL * 3 + scale_bytes(row_count, D_MODEL, scales == BLOCK_SCALES)


def sweep() -> None:
    """Print the time of every row tiling, as JSON lines."""
    for row_count in (512, 16384):
        for name, (scales, _) in FORMS.items():
            inputs, traffic = make_inputs(row_count, scales), _traffic(row_count, scales)
            shape = f"{row_count} x {D_MODEL}, {name}"
            print_sweep("quantize", shape, row_count, D_MODEL, traffic, quantize_activation, inputs)


if __name__ == "__main__":
    sweep()
