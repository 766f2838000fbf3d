"""The whole sparse-MoE block, router to combination."""

from __future__ import annotations

from torch import Tensor

from .combine import combine
from .configurations import Configuration, choose_configuration
from .cuda import warp_specialized_takes
from .experts import expert_linear, gate_up_swiglu
from .libraries import deep_gemm_takes, with_groups
from .reference import ExpertWeights
from .routing import Router, RouterTiling, route, route_and_sort, sort_rows


def expert_outputs(
    x: Tensor,
    scale: Tensor | None,
    logits: Tensor | Router,
    selection_bias: Tensor,
    weights: ExpertWeights,
    top_k: int,
    configuration: Configuration | None = None,
    router_tiling: RouterTiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `combine` or `combine_norm_quantize` adds up: (expert outputs, positions, slot weights).

    Args:
        x, scale: normed tokens as the weights' recipe takes them, see `gate_up_swiglu`.
        logits: contiguous float32 or bfloat16 [tokens, routed experts], or the router that makes them. The weights'
            further experts are shared ones, computed for every token in the same launches.
        configuration, router_tiling: fix the implementations, which otherwise follow from the number of tokens.
    """
    experts = weights.gate_up.shape[0]
    shared_experts = experts - len(selection_bias)
    if configuration is None:
        pairs = ((weights.gate_up_scale, weights.gate_up), (weights.down_scale, weights.down))
        configuration = choose_configuration(
            len(x) * (top_k + shared_experts),
            experts,
            fp8=scale is not None,
            library=all(deep_gemm_takes(weight_scale, weight) for weight_scale, weight in pairs),
            warp_specialized=all(warp_specialized_takes(weight, weight_scale) for weight_scale, weight in pairs),
        )
    block_m = configuration.gate_up.block_m
    if router_tiling is None:
        slot_weights, rows = route_and_sort(logits, selection_bias, top_k, shared_experts, block_m)
    else:
        routing = route(logits, selection_bias, top_k, shared_experts, router_tiling)
        slot_weights, rows = routing.weights, sort_rows(routing, experts, block_m)
    if configuration.library is not None:
        rows = with_groups(rows, experts, configuration.library)
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
