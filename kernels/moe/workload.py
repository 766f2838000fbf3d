"""What the benchmark runs on: the 4B-A0.5B preset's MoE block, with batches carried through every stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..benchmarking import copies_beyond_l2
from ..quantize.reference import quantize_row_blocks_e4m3, quantize_tiles_e4m3
from .configurations import Configuration
from .experts import Implementation, expert_linear, gate_up_swiglu
from .libraries import with_groups
from .reference import ExpertWeights, SortedRows
from .routing import Routing, route, sort_rows

ROUTED, TOP_K, D_MODEL, WIDTH = 53, 3, 1408, 1408
EXPERTS, SLOTS = ROUTED + 1, TOP_K + 1  # with one shared expert


@dataclass(frozen=True)
class Batch:
    """One batch of tokens, and what each stage of the block hands to the next."""

    x: Tensor
    scale: Tensor | None
    logits: Tensor
    bias: Tensor
    residual: Tensor
    routing: Routing
    rows: SortedRows
    hidden: Tensor
    hidden_scale: Tensor | None
    outputs: Tensor


def make_weights(fp8: bool) -> ExpertWeights:
    """Gaussian weights of all experts, the shared one last; BF16 or fp8_block."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator) / math.sqrt(shape[-1])

    gate_up, down = random(EXPERTS, 2 * WIDTH, D_MODEL), random(EXPERTS, D_MODEL, WIDTH)
    if not fp8:
        return ExpertWeights(gate_up.bfloat16(), down.bfloat16())
    (gate_up_codes, gate_up_scale), (down_codes, down_scale) = quantize_tiles_e4m3(gate_up), quantize_tiles_e4m3(down)
    return ExpertWeights(gate_up_codes, down_codes, gate_up_scale, down_scale)


def make_batch(tokens: int, weights: ExpertWeights, configuration: Configuration, seed: int) -> Batch:
    """Gaussian tokens; logits of unit variance load the experts about evenly, as a balanced router does."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, residual = (torch.randn(tokens, D_MODEL, device="cuda", generator=generator).bfloat16() for _ in range(2))
    logits = torch.randn(tokens, ROUTED, device="cuda", generator=generator)
    bias = torch.zeros(ROUTED, device="cuda")
    scale = None
    if weights.gate_up_scale is not None:
        x, scale = quantize_row_blocks_e4m3(x)
        scale = scale.T.contiguous().T  # column-major, as the norm leaves it
    routing = route(logits, bias, TOP_K, 1)
    rows = sort_rows(routing, EXPERTS, configuration.gate_up.block_m)
    if configuration.library is not None:
        rows = with_groups(rows, EXPERTS, configuration.library)
    hidden, hidden_scale = run_gate_up(x, scale, weights, rows, configuration.gate_up)
    outputs = run_down(hidden, hidden_scale, weights, rows, configuration.down)
    return Batch(x, scale, logits, bias, residual, routing, rows, hidden, hidden_scale, outputs)


def make_batches(tokens: int, weights: ExpertWeights, configuration: Configuration) -> list[tuple[Batch]]:
    """So many that none is found in the cache; the weights are larger than the cache by themselves."""
    copies = copies_beyond_l2(tokens * SLOTS * D_MODEL * 2, at_most=8)
    return [(make_batch(tokens, weights, configuration, seed),) for seed in range(copies)]


def run_gate_up(
    x: Tensor, scale: Tensor | None, weights: ExpertWeights, rows: SortedRows, tiling: Implementation
) -> tuple[Tensor, Tensor | None]:
    """The first GEMM as the block runs it."""
    quantize = weights.down_scale is not None
    return gate_up_swiglu(x, scale, weights.gate_up, weights.gate_up_scale, rows, tiling, quantize)


def run_down(
    hidden: Tensor, scale: Tensor | None, weights: ExpertWeights, rows: SortedRows, tiling: Implementation
) -> Tensor:
    """The second GEMM as the block runs it."""
    return expert_linear(hidden, scale, weights.down, weights.down_scale, rows, tiling)
