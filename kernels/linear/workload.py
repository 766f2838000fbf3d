"""Random inputs of a dense linear; the check and timing of implementations that dispatch and benchmark share."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..benchmarking import copies_beyond_l2, time_us
from ..quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3, quantize_tiles_e4m3
from . import reference
from .implementations import RECIPES, linear, weight_scale_for

logger = logging.getLogger(__name__)

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""x, scale, weight, weight_scale."""

# Largest relative error of a row that an implementation may have against float32 sums. Rounding to bfloat16 alone costs
# 0.0017, and sums that FP8 tensor cores keep to 14 bits up to 0.003; the recipes themselves err by 0.037 through E4M3.
ERROR_LIMITS = {"bf16": 2**-8, "fp8_row": 2**-7, "fp8_block": 2**-7}


@dataclass(frozen=True)
class Timing:
    """One implementation at one shape: microseconds a call, and its error as in `ERROR_LIMITS`."""

    implementation: str
    us: float
    error: float


def make_operands(recipe: str, rows: int, n: int, k: int, device: torch.device | str, seed: int = 0) -> Operands:
    """Gaussian operands of unit gain in a recipe's form; row magnitudes differ, block scales are column-major.

    Raises ValueError for an unknown recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe!r}")
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, k, device=device, generator=generator)
    x *= torch.rand(rows, 1, device=device, generator=generator) + 0.5
    weight = torch.randn(n, k, device=device, generator=generator) / math.sqrt(k)
    if recipe == "bf16":
        return x.bfloat16(), None, weight.bfloat16(), None
    if recipe == "fp8_row":
        return *quantize_rows_e4m3(x.bfloat16()), *quantize_rows_e4m3(weight)
    codes, scale = quantize_row_blocks_e4m3(x.bfloat16())
    padded = torch.zeros(scale.shape[1], -(-rows // 4) * 4, device=device).T[:rows]  # laid out as by allocate_scales
    return codes, padded.copy_(scale), *quantize_tiles_e4m3(weight)


def largest_row_error(found: Tensor, expected: Tensor) -> float:
    """Largest over the rows of |found - expected| / |expected|; NaN counts as infinite."""
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-20)
    return float(error.nan_to_num(nan=math.inf).max())


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
    bytes_each = (rows + n) * k * (2 if recipe == "bf16" else 1)
    operands = [make_operands(recipe, rows, n, k, device, seed) for seed in range(copies_beyond_l2(bytes_each))]
    expected = reference.linear(*operands[0])
    for name in names:
        inputs = [(x, scale, weight, weight_scale_for(name, its)) for x, scale, weight, its in operands]

        def call(
            x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None, name: str = name
        ) -> Tensor:
            return linear(x, scale, weight, weight_scale, name, out_dtype)

        where = f"{name}, {recipe} {rows} x {n} x {k}"
        try:
            error = largest_row_error(call(*inputs[0]), expected)
            if error > ERROR_LIMITS[recipe]:
                logger.warning("%s: error %.2g, more than %.2g; left out", where, error, ERROR_LIMITS[recipe])
                continue
            us = time_us(call, inputs, repeats)
        except Exception as failure:  # libraries refuse shapes, and compilers resources, with exceptions of their own
            logger.warning("%s: %s; left out", where, str(failure)[:300])
            continue
        yield Timing(name, us, error)
