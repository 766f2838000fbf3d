"""Random inputs of a dense linear; the check and timing of implementations that dispatch and benchmark share."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..benchmarking import copies_beyond_l2, time_us
from ..quantize.reference import (
    quantize_row_blocks_e4m3,
    quantize_rows_e4m3,
    quantize_static_e4m3,
    quantize_tiles_e4m3,
    static_scale_e4m3,
)
from . import reference
from .implementations import MEASURED_RECIPES, linear, weight_scale_for

logger = logging.getLogger(__name__)

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""x, scale, weight, weight_scale."""

# Largest relative error of a row that an implementation may have against float32 sums. Rounding to bfloat16 alone costs
# 0.0017, and sums that FP8 tensor cores keep to 14 bits up to 0.003; the recipes themselves err by 0.037 through E4M3.
ERROR_LIMITS = {"bf16": 2**-8, "fp8_row": 2**-7, "fp8_block": 2**-7, "fp8_tensor": 2**-7}
MERE_FLOOR = 0.1
MERE_ROWS = 512
"""Rows that are compared with the product before quantization."""
REPEATS, FINAL_REPEATS = 11, 25
FINALISTS = 1.1
"""What is within this factor of the fastest is timed again, more often, before the fastest is named."""


@dataclass(frozen=True)
class Timing:
    """One implementation at one shape.

    Attributes:
        us: microseconds a call.
        error: as in `ERROR_LIMITS`, against the recipe's own definition.
        mere: `floored_mere` against the product of the operands before they were quantized.
    """

    implementation: str
    us: float
    error: float
    mere: float = math.nan


def make_values(rows: int, n: int, k: int, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What operands are made of: Gaussian bfloat16 x [rows, k], whose rows differ in magnitude, and float32 weight
    [n, k] of unit gain."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, k, device=device, generator=generator)
    x *= torch.rand(rows, 1, device=device, generator=generator) + 0.5
    weight = torch.randn(n, k, device=device, generator=generator) / math.sqrt(k)
    return x.bfloat16(), weight


def make_operands(recipe: str, rows: int, n: int, k: int, device: torch.device | str, seed: int = 0) -> Operands:
    """Gaussian operands of unit gain in a recipe's form; row magnitudes differ, block scales are column-major.

    Raises ValueError for an unknown recipe.
    """
    if recipe not in MEASURED_RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(MEASURED_RECIPES)}, got {recipe!r}")
    return quantized_operands(recipe, *make_values(rows, n, k, device, seed))


def quantized_operands(recipe: str, x: Tensor, weight: Tensor) -> Operands:
    """Values as of `make_values` in a recipe's form; fp8_tensor takes its scales from these very values."""
    if recipe == "bf16":
        return x, None, weight.bfloat16(), None
    if recipe == "fp8_row":
        return *quantize_rows_e4m3(x), *quantize_rows_e4m3(weight)
    if recipe == "fp8_tensor":
        x_scale, weight_scale = (static_scale_e4m3(float(it.abs().max())).to(x.device) for it in (x, weight))
        return quantize_static_e4m3(x, x_scale), x_scale, quantize_static_e4m3(weight, weight_scale), weight_scale
    rows = len(x)
    codes, scale = quantize_row_blocks_e4m3(x)
    padded = torch.zeros(scale.shape[1], -(-rows // 4) * 4, device=x.device).T[:rows]  # laid out as by allocate_scales
    return codes, padded.copy_(scale), *quantize_tiles_e4m3(weight)


def largest_row_error(found: Tensor, expected: Tensor) -> float:
    """Largest over the rows of |found - expected| / |expected|; NaN counts as infinite."""
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-20)
    return float(error.nan_to_num(nan=math.inf).max())


def floored_mere(found: Tensor, expected: Tensor) -> float:
    """Mean of |found - expected| / |expected| (arXiv 2605.10886) with |expected| floored at 0.1 of its RMS.

    As `loka_serve.probe.errors.output_error` defines it for decisions, which kernels may not import. NaN where an
    output is.
    """
    magnitude = expected.double().abs()
    floor = MERE_FLOOR * magnitude.square().mean().sqrt()
    return float(((found.double() - expected.double()).abs() / magnitude.clamp(min=floor).clamp(min=1e-300)).mean())


class Workload:
    """One shape in one recipe: inputs and weights that rotate past the cache, and what they should give."""

    def __init__(
        self, recipe: str, rows: int, n: int, k: int, device: torch.device | str, copies: int | None = None
    ) -> None:
        """`copies` sets of operands, by default as many as are larger than the cache.

        Raises ValueError for an unknown recipe.
        """
        if copies is None:
            copies = copies_beyond_l2((rows + n) * k * (2 if recipe == "bf16" else 1))
        self.recipe, self.where = recipe, f"{recipe} {rows} x {n} x {k}"
        self.operands = [make_operands(recipe, rows, n, k, device, seed) for seed in range(copies)]
        self.expected = reference.linear(*self.operands[0])
        x, weight = make_values(rows, n, k, device, 0)
        self.exact = x[:MERE_ROWS].float() @ weight.T

    def time(self, name: str, out_dtype: torch.dtype, repeats: int) -> Timing | None:
        """Checks an implementation and times it; None, and a line in the log, if it fails or errs beyond the limit."""
        inputs = [(x, scale, weight, weight_scale_for(name, its)) for x, scale, weight, its in self.operands]

        def call(x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
            return linear(x, scale, weight, weight_scale, name, out_dtype)

        limit = ERROR_LIMITS[self.recipe]
        try:
            found = call(*inputs[0])
            error, mere = largest_row_error(found, self.expected), floored_mere(found[:MERE_ROWS], self.exact)
            if error > limit:
                logger.warning("%s, %s: error %.2g, more than %.2g; left out", name, self.where, error, limit)
                return None
            return Timing(name, time_us(call, inputs, repeats), error, mere)
        except Exception as failure:  # libraries refuse shapes, and compilers resources, with exceptions of their own
            logger.warning("%s, %s: %s; left out", name, self.where, str(failure)[:300])
            return None


def time_implementations(
    names: Sequence[str],
    recipe: str,
    rows: int,
    n: int,
    k: int,
    device: torch.device | str,
    out_dtype: torch.dtype = torch.bfloat16,
    repeats: int = 25,
) -> Iterator[Timing]:
    """Checks each implementation against the reference and times it on inputs and weights rotated past the cache.

    One that fails, or errs by more than the recipe's limit, is logged and left out.
    """
    workload = Workload(recipe, rows, n, k, device)
    for name in names:
        timing = workload.time(name, out_dtype, repeats)
        if timing is not None:
            yield timing


def rank_implementations(
    names: Sequence[str],
    recipe: str,
    rows: int,
    n: int,
    k: int,
    device: torch.device | str,
    out_dtype: torch.dtype = torch.bfloat16,
) -> list[Timing]:
    """As `time_implementations`, fastest first; those close to the fastest are timed a second time, more often."""
    workload = Workload(recipe, rows, n, k, device)
    timings = [timing for name in names if (timing := workload.time(name, out_dtype, REPEATS)) is not None]
    if timings:
        bound = FINALISTS * min(timing.us for timing in timings)
        close = [timing for timing in timings if timing.us <= bound]
        if len(close) > 1:
            again = {
                timing.implementation: workload.time(timing.implementation, out_dtype, FINAL_REPEATS)
                for timing in close
            }
            timings = [again.get(timing.implementation) or timing for timing in timings]
    return sorted(timings, key=lambda timing: timing.us)
