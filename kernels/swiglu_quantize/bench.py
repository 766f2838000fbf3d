"""SwiGLU and quantization in one pass, against the same chain under torch.compile; a sweep of row tilings.

python -m loka_serve.kernels.swiglu_quantize.bench prints the sweep.
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
    dequantized,
    make_row,
    print_sweep,
    relative_error,
    scale_bytes,
    time_us,
)
from . import reference
from .triton import swiglu_quantize

DENSE_WIDTH = 3840  # onerec-v2-4b-a0.5b's dense blocks; its experts are as wide as the model
CASES = ((D_MODEL, False), (D_MODEL, True), (DENSE_WIDTH, True))


def rows() -> Iterator[KernelRow]:
    """Each width and form of scales at each row count."""
    baseline = compiled(reference.swiglu_quantize)
    for width, block_scales in CASES:
        for row_count in ROW_COUNTS:
            inputs = make_inputs(row_count, width, block_scales)
            found, expected = swiglu_quantize(*inputs[0]), reference.swiglu_quantize(*inputs[0])
            error = relative_error(dequantized(*found), dequantized(*expected))
            us, beside = time_us(swiglu_quantize, inputs), ("torch.compile", time_us(baseline, inputs))
            shape, traffic = _shape(row_count, width, block_scales), _traffic(row_count, width, block_scales)
            yield make_row("swiglu_quantize", shape, us, 0, traffic, beside, error)


def make_inputs(row_count: int, width: int, block_scales: bool) -> list[tuple[Tensor, bool]]:
    """Sets of arguments that together exceed the L2 cache."""
    copies = copies_beyond_l2(row_count * width * 4)
    return [(torch.randn(row_count, 2 * width, device="cuda").bfloat16(), block_scales) for _ in range(copies)]


def _shape(row_count: int, width: int, block_scales: bool) -> str:
    return f"{row_count} x {width}, {'block' if block_scales else 'row'} scales"


def _traffic(row_count: int, width: int, block_scales: bool) -> int:
    return row_count * width * 5 + scale_bytes(row_count, width, block_scales)


def sweep() -> None:
    """Print the time of every row tiling, as JSON lines."""
    for row_count in (512, 16384):
        for case in CASES:
            inputs, traffic = make_inputs(row_count, *case), _traffic(row_count, *case)
            print_sweep(
                "swiglu_quantize", _shape(row_count, *case), row_count, case[0], traffic, swiglu_quantize, inputs
            )


if __name__ == "__main__":
    sweep()
