"""Beam attention against torch's SDPA backends at the shapes of a decode step, and a sweep over configurations.

`python -m loka_serve.kernels.beam_attention.bench` prints the sweep, on which the table in `configurations` rests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..benchmarking import KernelRow, copies_beyond_l2, make_row, time_us
from . import reference
from .configurations import (
    CANDIDATES,
    FEW_ROWS_CANDIDATES,
    IN_USE,
    WARP_SPECIALIZED,
    Configuration,
    WarpSpecialized,
)
from .triton import beam_attention, beam_attention_fp8
from .triton_context import clear_padding, quantize_context

HEADS, HEAD_DIM = 11, 128  # onerec-v2-4b-a0.5b; as many groups, and keys that are the values
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Shape:
    """A decode level of a batch; ragged ones have lengths and beam counts from a third of these to all of them."""

    batch: int
    beams: int
    context: int
    ragged: bool = False

    def __str__(self) -> str:
        return f"B{self.batch} W{self.beams} ctx {self.context}" + (" ragged" if self.ragged else "")


SHAPES = (
    Shape(8, 512, 3000),
    Shape(8, 512, 3000, ragged=True),
    Shape(1, 512, 3000),
    Shape(32, 512, 3000),
    Shape(8, 128, 3000),
    Shape(8, 512, 512),
    Shape(8, 128, 512),
    Shape(1, 128, 512),
    Shape(1, 64, 3000),
    Shape(1, 1, 3000),
    Shape(8, 1, 3000),
    Shape(32, 1, 3000),
)
SWEPT = (
    Shape(32, 512, 3000),
    Shape(8, 512, 3000),
    Shape(8, 512, 3000, ragged=True),
    Shape(1, 512, 3000),
    Shape(8, 128, 512),
)
SWEPT_FEW_ROWS = (Shape(1, 1, 3000), Shape(8, 1, 3000))


@dataclass(frozen=True)
class Inputs:
    """One call's tensors, see `reference.beam_attention`; keys are the values."""

    query: Tensor
    keys: Tensor
    lengths: Tensor
    beam_counts: Tensor
    out: Tensor

    @staticmethod
    def make(shape: Shape, seed: int) -> Inputs:
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device="cuda", generator=generator).bfloat16()

        def numbers(most: int) -> Tensor:
            parts = torch.linspace(1 / 3 if shape.ragged else 1, 1, shape.batch, dtype=torch.float64)
            return (parts * most).ceil().int().cuda()

        query = normal(shape.batch, shape.beams, HEADS, HEAD_DIM)
        keys = normal(shape.batch, shape.context + 1, HEADS, HEAD_DIM)
        inputs = Inputs(query, keys, numbers(shape.context + 1), numbers(shape.beams), torch.zeros_like(query))
        clear_padding(inputs.keys, inputs.lengths)
        return inputs

    def flops(self) -> float:
        return 4.0 * HEADS * HEAD_DIM * float((self.lengths.double() * self.beam_counts).sum())

    def traffic(self, slot_bytes: int) -> float:
        """Queries in, results out, visible slots once."""
        rows = float(self.beam_counts.sum()) * 4 + float(self.lengths.sum()) * slot_bytes
        return rows * HEADS * HEAD_DIM


def rows() -> Iterator[KernelRow]:
    """BF16 and E4M3 at each shape beside SDPA backends (which compute ragged shapes padded), then the rounding."""
    for shape in SHAPES:
        inputs = make_inputs(shape)
        first = inputs[0]
        exact = reference.beam_attention(first.query, first.keys, first.keys, first.lengths, first.beam_counts)
        baselines = [(f"{name}, BF16", time_us(*sdpa(backend, inputs))) for name, backend in BACKENDS.items()]
        for precision, call, arguments in kernels(inputs):
            error = _relative_error(call(*arguments[0]), exact)
            us = time_us(call, arguments)
            traffic = first.traffic(2)
            for baseline in baselines:
                yield make_row("beam_attention", f"{shape} {precision}", us, first.flops(), traffic, baseline, error)
        yield _context_row(shape, inputs)


def _context_row(shape: Shape, inputs: list[Inputs]) -> KernelRow:
    """Rounding a context to E4M3: read once, written as keys and as values."""
    arguments = [(one.keys, one.keys, one.lengths) for one in inputs]
    codes = quantize_context(*arguments[0])
    expected = reference.quantize_context(*arguments[0])
    error = _relative_error(codes.values.float(), expected.values.float())
    us, compiled = time_us(quantize_context, arguments), torch.compile(reference.quantize_context)
    traffic = float(inputs[0].lengths.sum()) * HEADS * HEAD_DIM * 4
    name = f"B{shape.batch} ctx {shape.context}" + (" ragged" if shape.ragged else "")
    return make_row("quantize_context", name, us, 0, traffic, ("torch.compile", time_us(compiled, arguments)), error)


def make_inputs(shape: Shape) -> list[Inputs]:
    """Sets of inputs that together exceed the L2 cache."""
    size = 2 * shape.batch * HEADS * HEAD_DIM * (2 * shape.beams + shape.context)
    return [Inputs.make(shape, seed) for seed in range(copies_beyond_l2(size))]


def kernels(
    inputs: list[Inputs], configuration: Configuration | WarpSpecialized | None = None
) -> Iterator[tuple[str, Callable[..., Tensor], list[tuple[object, ...]]]]:
    """(precision, call, its arguments for each input) of both kernels; contexts are rounded beforehand."""
    if not isinstance(configuration, WarpSpecialized):
        bf16: list[tuple[object, ...]] = [
            (one.query, one.keys, one.keys, one.lengths, one.beam_counts, None, one.out, configuration)
            for one in inputs
        ]
        yield "BF16", beam_attention, bf16
    fp8: list[tuple[object, ...]] = [
        (
            one.query,
            quantize_context(one.keys, one.keys, one.lengths),
            one.lengths,
            one.beam_counts,
            None,
            one.out,
            configuration,
        )
        for one in inputs
    ]
    yield "FP8", beam_attention_fp8, fp8


def sdpa(backend: SDPBackend, inputs: list[Inputs]) -> tuple[Callable[..., Tensor], list[tuple[Tensor, Tensor]]]:
    """One SDPA backend on padded batches, laid out as it likes them."""

    def call(query: Tensor, keys: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, keys, keys)

    return call, [(one.query.transpose(1, 2), one.keys.transpose(1, 2)) for one in inputs]


def sweep() -> None:
    """Print the time of every candidate at the shapes that matter, fastest first; `*` marks what the table chooses."""
    for shapes, candidates in ((SWEPT, CANDIDATES + WARP_SPECIALIZED), (SWEPT_FEW_ROWS, FEW_ROWS_CANDIDATES)):
        for shape in shapes:
            inputs = make_inputs(shape)
            times: dict[str, list[tuple[float, Configuration | WarpSpecialized]]] = {"BF16": [], "FP8": []}
            for candidate in candidates:
                for precision, call, arguments in kernels(inputs, candidate):
                    try:
                        times[precision].append((time_us(call, arguments, repeats=15), candidate))
                    except Exception as error:  # a candidate that does not fit is reported, not fatal
                        print(f"{shape} {precision} {candidate}: {type(error).__name__}: {str(error)[:100]}")
            for precision, found in times.items():
                for us, candidate in sorted(found, key=lambda pair: pair[0]):
                    mark = "*" if candidate in IN_USE else " "
                    tflops = inputs[0].flops() / us / 1e6
                    print(f"{shape} {precision} {mark} {us:9.1f} us {tflops:7.1f} TFLOP/s {candidate}", flush=True)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


if __name__ == "__main__":
    sweep()
