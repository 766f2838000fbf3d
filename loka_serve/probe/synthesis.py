"""Error of each recipe on synthetic inputs and weights, drawn from what the probe estimated: no real row is needed.

A pair is X' = 1 mu^T + Z L^T and W' = M + L_U Z L_V^T (LoKA, arXiv 2605.10886). What real rows have beyond two
moments, rare large values above all, is missing here, so the choice of a recipe is made on the sample of real rows;
these figures say how sure one may be of an error, and can be had where no row may be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.probe.activations import GaussianEstimate, GaussianRows
from loka_serve.probe.errors import output_error
from loka_serve.probe.matrix_normal import MatrixNormal, estimate_matrix_normal
from loka_serve.quantization.recipes import RECIPES

PAIRS = 100
ROWS = 32
LEAST_PAIRS = 8
TOGETHER = 4
"""Pairs that are drawn and rounded at once."""
MAX_VALUES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Synthetic weights a site, over all pairs: half a second of one core."""
FIGURES = ("mere", "floored_mere", "sqnr_db", "relative_frobenius")


@dataclass(frozen=True)
class Estimate:
    """Mean over pairs and its 95 % confidence interval (Student's t; none, both ends NaN, for one pair)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class SyntheticErrors:
    """Errors over synthetic pairs of one site.

    Attributes:
        pairs: how many.
        pairs_reason: why they are fewer than asked for, else empty.
        rows, outputs: of X' and of W' in a pair; a wide site is drawn a block of output channels a pair.
        flip_flop_iterations, flip_flop_converged: of the weight's estimate.
        errors: by recipe and by figure of `errors.OutputError`.
    """

    pairs: int
    pairs_reason: str
    rows: int
    outputs: int
    flip_flop_iterations: int
    flip_flop_converged: bool
    errors: Mapping[str, Mapping[str, Estimate]]


@torch.inference_mode()
def synthesize_errors(
    weight: Tensor,
    inputs: GaussianEstimate,
    input_amax: float,
    pairs: int = PAIRS,
    recipes: Sequence[str] = tuple(RECIPES),
    seed: int = 0,
) -> SyntheticErrors | None:
    """Measure recipes on synthetic pairs of one site; None where it saw no rows or no pairs are asked for.

    Pairs go round the groups that saw rows, and round the blocks of output channels.

    Args:
        weight: [out, in] or [groups, out, in], finite, any float dtype; drawn and multiplied on its device.
        inputs: of the same groups.
        input_amax: largest input magnitude in calibration, for recipes with a static scale.
        pairs: at most so many; fewer where the site is wide, at least 8.
    """
    seen = (inputs.counts > 0).nonzero().flatten().tolist()
    if not seen or pairs < 1:
        return None
    model, rows = estimate_matrix_normal(weight), GaussianRows(inputs)
    generator = torch.Generator(weight.device).manual_seed(seed)
    count, reason = affordable_pairs(pairs, model, weight.device.type)
    blocks = model.row_factor.shape[0]
    measured: dict[str, list[tuple[float, ...]]] = {recipe: [] for recipe in recipes}
    for start in range(0, count, TOGETHER):
        places = [(seen[pair % len(seen)], pair // len(seen) % blocks) for pair in range(start, start + TOGETHER)]
        places = places[: count - start]
        matrices = torch.stack([model.draw(group, block, generator) for group, block in places])
        drawn = torch.stack([rows.draw(ROWS, group, generator) for group, _ in places])
        reference = drawn @ matrices.mT
        for recipe in recipes:
            for output, exact in zip(_outputs(recipe, matrices, drawn, input_amax), reference, strict=True):
                error = output_error(output, exact)
                measured[recipe].append(tuple(getattr(error, figure) for figure in FIGURES))
    errors = {
        recipe: {figure: estimate([values[column] for values in figures]) for column, figure in enumerate(FIGURES)}
        for recipe, figures in measured.items()
    }
    return SyntheticErrors(count, reason, ROWS, model.row_factor.shape[-1], model.iterations, model.converged, errors)


def affordable_pairs(pairs: int, model: MatrixNormal, device_type: str) -> tuple[int, str]:
    """How many pairs a site gets, and why fewer than asked for."""
    values = model.row_factor.shape[-1] * model.mean.shape[1]
    limit = MAX_VALUES.get(device_type, MAX_VALUES["cpu"])
    count = min(pairs, max(LEAST_PAIRS, limit // values))
    if count == pairs:
        return count, ""
    return count, f"a pair has {values} weights, and a site draws about {limit} in all on {device_type}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of independent values."""
    sample = torch.tensor(values, dtype=torch.float64)
    mean = float(sample.mean())
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan)
    half = student_quantile(len(values) - 1) * float(sample.std()) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def student_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t, within 0.1 % from 4 degrees of freedom on, 0.5 % for 3.

    The expansion in 1 / degrees of Abramowitz and Stegun, 26.7.5; 1 and 2 degrees have closed forms.
    """
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959963984540054
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def _outputs(name: str, matrices: Tensor, rows: Tensor, input_amax: float) -> Tensor:
    """Outputs [pairs, rows, out] of a recipe for rows [pairs, rows, in] and weights [pairs, out, in]."""
    recipe = RECIPES[name]
    state = recipe.quantize_weight(matrices, input_amax if recipe.needs_input_amax else None)
    codes = [
        {key: tensor[pair] if tensor.ndim else tensor for key, tensor in state.items()} for pair in range(len(matrices))
    ]
    inputs = recipe.round_inputs(rows.flatten(0, 1), state).view_as(rows)
    return inputs @ torch.stack([recipe.dequantize_weight(one) for one in codes]).mT
