"""Every configuration of `configurations.py` at one shape: time and error of the two GEMMs, for the dispatch table."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..benchmarking import copies_beyond_l2, time_us
from ..dispatch_file import Shape
from ..linear.workload import FINAL_REPEATS, FINALISTS, MERE_ROWS, REPEATS, Timing, floored_mere, quantized_operands
from ..quantize.reference import quantize_tiles_e4m3
from .configurations import BF16_CONFIGURATIONS, FP8_CONFIGURATIONS, Configuration
from .cuda import warp_specialized_takes
from .experts import expert_linear, gate_up_swiglu
from .libraries import deep_gemm_takes, with_groups
from .reference import ExpertWeights, SortedRows
from .routing import Routing, route, sort_rows
from .sweep import name as implementation_name

logger = logging.getLogger(__name__)

RECIPES = ("bf16", "fp8_block")
# Largest error of all outputs, relative, against float32 products of what was quantized: two GEMMs, of which E4M3 alone
# makes 0.06; a kernel that is wrong errs by about 1.
ERROR_LIMITS = {"bf16": 2**-6, "fp8_block": 2**-3}
BEYOND = 4
"""A configuration is tried for up to so many times the rows an expert that the table chooses it for."""
MOST_COPIES = 8


@functools.cache
def configurations_of(recipe: str) -> Mapping[str, Configuration]:
    """By name: everything that the recipe's table names; none for a recipe without a table."""
    return {configuration_name(configuration): configuration for _, configuration in _table(recipe)}


def configuration_name(configuration: Configuration) -> str:
    """Of both GEMMs, as a table writes it."""
    names = (implementation_name(configuration.gate_up), implementation_name(configuration.down))
    return names[0] if names[0] == names[1] else " + ".join(names)


def configurations_for(shape: Shape, weights: ExpertWeights) -> dict[str, Configuration]:
    """Those that run here and are worth trying at so many rows an expert."""
    pairs = ((weights.gate_up_scale, weights.gate_up), (weights.down_scale, weights.down))
    library = all(deep_gemm_takes(scale, weight) for scale, weight in pairs)
    specialized = all(warp_specialized_takes(weight, scale) for scale, weight in pairs)
    rows_each = shape.rows * shape.slots / shape.groups
    return {
        configuration_name(configuration): configuration
        for limit, configuration in _table(shape.recipe)
        if rows_each <= BEYOND * limit
        and (library or configuration.library is None)
        and (specialized or not configuration.warp_specialized)
    }


@dataclass(frozen=True)
class _Tokens:
    """One batch: tokens as the recipe takes them, and where they go."""

    x: Tensor
    scale: Tensor | None
    routing: Routing


def rank_configurations(shape: Shape, device: torch.device | str) -> list[Timing]:
    """Times both GEMMs, activation between them and the library's groups included, router and sort not; fastest first.

    What fails, or errs beyond `ERROR_LIMITS`, is logged and left out; recipes that have no table have none.
    """
    if shape.recipe not in RECIPES:
        return []
    values = _weights(shape, device)
    weights = _quantized(shape.recipe, *values)
    copies = copies_beyond_l2(shape.rows * shape.slots * shape.k * 2, at_most=MOST_COPIES)
    batches = [_tokens(shape, device, seed) for seed in range(copies)]
    exact = _exact(_values_of(shape, device, 0), batches[0].routing, *values)
    del values
    found = configurations_for(shape, weights)
    timings = {name: _time(name, use, shape, weights, batches, exact, REPEATS) for name, use in found.items()}
    bound = FINALISTS * min((timing.us for timing in timings.values() if timing), default=math.inf)
    close = [name for name, timing in timings.items() if timing and timing.us <= bound]
    if len(close) > 1:
        for name in close:
            again = _time(name, found[name], shape, weights, batches, exact, FINAL_REPEATS)
            timings[name] = again or timings[name]
    return sorted((timing for timing in timings.values() if timing), key=lambda timing: timing.us)


def _time(
    name: str,
    use: Configuration,
    shape: Shape,
    weights: ExpertWeights,
    batches: list[_Tokens],
    exact: Tensor,
    repeats: int,
) -> Timing | None:
    def call(x: Tensor, scale: Tensor | None, rows: SortedRows) -> Tensor:
        if use.library is not None:
            rows = with_groups(rows, shape.groups, use.library)
        quantize = weights.down_scale is not None
        hidden, hidden_scale = gate_up_swiglu(
            x, scale, weights.gate_up, weights.gate_up_scale, rows, use.gate_up, quantize
        )
        return expert_linear(hidden, hidden_scale, weights.down, weights.down_scale, rows, use.down)

    where = f"{name}, {shape}"
    try:
        sorts = [sort_rows(batch.routing, shape.groups, use.gate_up.block_m) for batch in batches]
        inputs = [(batch.x, batch.scale, rows) for batch, rows in zip(batches, sorts, strict=True)]
        positions = sorts[0].positions[: len(exact)].long()
        found = call(*inputs[0])[positions]
        error = float((found.float() - exact).norm() / exact.norm())
        if not error <= ERROR_LIMITS[shape.recipe]:
            logger.warning("%s: error %.2g, more than %.2g; left out", where, error, ERROR_LIMITS[shape.recipe])
            return None
        return Timing(name, time_us(call, inputs, repeats), error, floored_mere(found, exact))
    except Exception as failure:  # of a library or a compiler, or too large for the device
        logger.warning("%s: %s; left out", where, str(failure)[:300])
        return None


def _weights(shape: Shape, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Gaussian float32 of unit gain: gate_up [groups, 2 n, k], down [groups, k, n]."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator) / math.sqrt(sizes[-1])

    return random(shape.groups, 2 * shape.n, shape.k), random(shape.groups, shape.k, shape.n)


def _quantized(recipe: str, gate_up: Tensor, down: Tensor) -> ExpertWeights:
    if recipe == "bf16":
        return ExpertWeights(gate_up.bfloat16(), down.bfloat16())
    (gate_up_codes, gate_up_scale), (down_codes, down_scale) = quantize_tiles_e4m3(gate_up), quantize_tiles_e4m3(down)
    return ExpertWeights(gate_up_codes, down_codes, gate_up_scale, down_scale)


def _values_of(shape: Shape, device: torch.device | str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape.rows, shape.k, device=device, generator=generator).bfloat16()


def _tokens(shape: Shape, device: torch.device | str, seed: int) -> _Tokens:
    """Gaussian tokens; logits of unit variance load the routed experts about evenly, as a balanced router does."""
    generator = torch.Generator(device).manual_seed(1000 + seed)
    routed = shape.groups - shape.shared
    logits = torch.randn(shape.rows, routed, device=device, generator=generator)
    routing = route(logits, torch.zeros(routed, device=device), shape.slots - shape.shared, shape.shared)
    x = _values_of(shape, device, seed)
    x, scale, _, _ = quantized_operands(shape.recipe, x, x[:1].float())
    return _Tokens(x, scale, routing)


def _exact(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """Float32 outputs [tokens, slots, k] of the first tokens, before any quantization."""
    x, selected = x[:MERE_ROWS].float(), routing.selected[:MERE_ROWS]
    out = x.new_zeros(*selected.shape, down.shape[1])
    for expert in range(len(gate_up)):
        tokens, slots = (selected == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = (x[tokens] @ gate_up[expert].T).chunk(2, dim=1)
            out[tokens, slots] = (F.silu(gate) * up) @ down[expert].T
    return out


def _table(recipe: str) -> tuple[tuple[float, Configuration], ...]:
    return {"bf16": BF16_CONFIGURATIONS, "fp8_block": FP8_CONFIGURATIONS}.get(recipe, ())
