"""The whole sparse-MoE block, router to combination, and the table of tilings it runs with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .combine import combine
from .experts import Tiling, expert_linear, gate_up_swiglu
from .reference import ExpertWeights
from .routing import Router, route_and_sort


@dataclass(frozen=True)
class Configuration:
    """Tilings of the two GEMMs, which share the blocks that rows are sorted into."""

    gate_up: Tiling
    down: Tiling


# For at most so many rows an expert (on average). Few rows: the weights' traffic is the cost, and small programs, two
# or three on a multiprocessor, keep it busy. Many rows: the largest tile whose sums fit the registers.
FP8_CONFIGURATIONS: tuple[tuple[float, Configuration], ...] = (
    (96, Configuration(Tiling(64, warps=4, stages=2), Tiling(64, warps=4, stages=3))),
    (float("inf"), Configuration(Tiling(128, warps=8, stages=4), Tiling(128, warps=8, stages=4, paired=True))),
)
BF16_CONFIGURATIONS: tuple[tuple[float, Configuration], ...] = (
    (96, Configuration(Tiling(64, warps=4, stages=2), Tiling(64, warps=4, stages=4))),
    (float("inf"), Configuration(Tiling(128, warps=8, stages=4), Tiling(128, warps=8, stages=3, paired=True))),
)


def choose_configuration(rows: int, experts: int, fp8: bool) -> Configuration:
    """The table's entry for so many (token, slot) rows over so many experts; known from shapes, fixed at capture."""
    table = FP8_CONFIGURATIONS if fp8 else BF16_CONFIGURATIONS
    return next(configuration for limit, configuration in table if rows <= limit * experts)


def expert_outputs(
    x: Tensor,
    scale: Tensor | None,
    logits: Tensor | Router,
    selection_bias: Tensor,
    weights: ExpertWeights,
    top_k: int,
    configuration: Configuration | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `combine` or `combine_norm_quantize` adds up: (expert outputs, positions, slot weights).

    Args:
        x, scale: normed tokens as the weights' recipe takes them, see `gate_up_swiglu`.
        logits: contiguous float32 or bfloat16 [tokens, routed experts], or the router that makes them. The weights'
            further experts are shared ones, computed for every token in the same launches.
        configuration: fixes the tilings, which otherwise follow from the number of tokens.
    """
    experts = weights.gate_up.shape[0]
    shared_experts = experts - len(selection_bias)
    if configuration is None:
        configuration = choose_configuration(len(x) * (top_k + shared_experts), experts, fp8=scale is not None)
    block_m = configuration.gate_up.block_m
    slot_weights, rows = route_and_sort(logits, selection_bias, top_k, shared_experts, block_m)
    hidden, hidden_scale = gate_up_swiglu(
        x,
        scale,
        weights.gate_up,
        weights.gate_up_scale,
        rows,
        configuration.gate_up,
        quantize=weights.down_scale is not None,
    )
    outputs = expert_linear(hidden, hidden_scale, weights.down, weights.down_scale, rows, configuration.down)
    return outputs, rows.positions, slot_weights


def moe_block(
    x: Tensor,
    scale: Tensor | None,
    logits: Tensor | Router,
    selection_bias: Tensor,
    weights: ExpertWeights,
    top_k: int,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
    configuration: Configuration | None = None,
) -> Tensor:
    """As `reference.moe_block`, without host synchronisation: bfloat16 [tokens, d_model].

    Arguments as in `expert_outputs`; `shared` (a shared expert computed elsewhere) and `residual`, bfloat16
    [tokens, d_model], are added to the result.
    """
    outputs, positions, slot_weights = expert_outputs(x, scale, logits, selection_bias, weights, top_k, configuration)
    return combine(outputs, positions, slot_weights, shared, residual)
