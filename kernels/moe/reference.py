"""What the kernels of the sparse-MoE block compute, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear.reference import linear_bf16, linear_block_scaled, linear_row_scaled
from ..quantize.reference import quantize_row_blocks_e4m3


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all experts of a block, shared ones last; `gate_up` holds the gate's rows first.

    Attributes:
        gate_up, down: [experts, 2 * width, d_model] and [experts, d_model, width], bfloat16 or E4M3.
        gate_up_scale, down_scale: None for bfloat16; float32 [experts, N] (a scale a channel), or
            [experts, ceil(N / 128), ceil(K / 128)] (fp8_block).
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None


@dataclass(frozen=True)
class SortedRows:
    """Tokens in the order of the experts that compute them, each expert's rows padded to whole blocks.

    Attributes:
        tokens: int32 [blocks * block_m], the token of each row; -1 in padding.
        expert_of_block: int32 [blocks]; -1 for blocks that are not needed, which come last.
        block_count: int32 [1], how many are needed.
        positions: int32 [tokens, slots], the row that each (token, slot) went to.
        block_m: rows of a block.
        groups: what a library takes in place of the others, see `libraries.with_groups`.
    """

    tokens: Tensor
    expert_of_block: Tensor
    block_count: Tensor
    positions: Tensor
    block_m: int
    groups: Tensor | None = None


def route(logits: Tensor, selection_bias: Tensor, top_k: int, shared_experts: int = 0) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights: sigmoid scores, a bias for selection only, normalised over the selected.

    Args:
        logits: float [tokens, experts].
        selection_bias: float [experts].
        shared_experts: so many experts with indices after the routed ones are appended to every token with weight 1.

    Returns:
        int32 and float32 [tokens, top_k + shared_experts], best first; ties go to the lower expert, NaN ranks first.
    """
    scores = torch.sigmoid(logits.float())
    selected = torch.sort(scores + selection_bias.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, selected)
    weights = weights / weights.sum(-1, keepdim=True)
    shared = torch.arange(shared_experts, device=logits.device) + logits.shape[1]
    selected = torch.cat([selected, shared.expand(len(selected), -1)], dim=1)
    return selected.int(), F.pad(weights, (0, shared_experts), value=1.0)


def block_bound(tokens: int, slots: int, experts: int, block_m: int) -> int:
    """The most blocks that so many tokens can need, however they spread over the experts."""
    rows = tokens * slots
    occupied = min(rows, experts)
    return (rows - occupied) // block_m + occupied


def sort_rows(selected: Tensor, experts: int, block_m: int) -> SortedRows:
    """Rows by expert, and by token within an expert; selected int [tokens, slots], distinct within a token."""
    tokens, slots = selected.shape
    blocks = block_bound(tokens, slots, experts, block_m)
    counts = torch.bincount(selected.flatten(), minlength=experts)
    block_ends = (-(-counts // block_m)).cumsum(0)
    starts = torch.cat([block_ends.new_zeros(1), block_ends])[:-1] * block_m
    order = selected.flatten().argsort(stable=True)
    expert = selected.flatten()[order].long()
    rows = starts[expert] + torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert]
    row_tokens = torch.full((blocks * block_m,), -1, dtype=torch.int32, device=selected.device)
    row_tokens[rows] = (order // slots).int()
    positions = torch.empty_like(order).scatter_(0, order, rows).view(tokens, slots).int()
    owner = torch.searchsorted(block_ends, torch.arange(blocks, device=selected.device), right=True)
    owner = torch.where(owner < experts, owner, -1).int()
    return SortedRows(row_tokens, owner, block_ends[-1:].int(), positions, block_m)


def expert_linear(
    x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None, rows: SortedRows
) -> Tensor:
    """Each sorted row times its expert's weight: float32 [padded rows, N], zeros in padding.

    Args:
        x: [padded rows, K]; bfloat16, or E4M3 with `scale` [padded rows] or [padded rows, ceil(K / 128)].
        weight: [experts, N, K], its scale as in `ExpertWeights`.
    """
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float32, device=x.device)
    for block, expert in enumerate(rows.expert_of_block.tolist()):
        span = torch.arange(block * rows.block_m, (block + 1) * rows.block_m, device=x.device)
        span = span[rows.tokens[span] >= 0]
        if expert < 0 or not len(span):
            continue
        if scale is None or weight_scale is None:
            out[span] = linear_bf16(x[span], weight[expert])
        else:
            product = linear_row_scaled if scale.ndim == 1 else linear_block_scaled
            out[span] = product(x[span], scale[span], weight[expert], weight_scale[expert])
    return out


def gate_up_swiglu(
    x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None, rows: SortedRows
) -> Tensor:
    """silu(gate) * up of each sorted row, float32 [padded rows, width]; x and scale are by token."""
    source = rows.tokens.clamp(min=0).long()
    gathered = x.view(torch.uint8)[source].view(x.dtype) if x.element_size() == 1 else x[source]
    gate_up = expert_linear(gathered, None if scale is None else scale[source], weight, weight_scale, rows)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def combine(
    outputs: Tensor, positions: Tensor, weights: Tensor, shared: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Weighted sum of each token's rows, plus `shared` and `residual`, in float32, rounded to bfloat16.

    Args:
        outputs: bfloat16 [padded rows, d_model].
        positions, weights: [tokens, slots].
        shared, residual: bfloat16 [tokens, d_model].
    """
    total = (outputs[positions.long()].float() * weights[..., None]).sum(1)
    for addend in (shared, residual):
        total = total if addend is None else total + addend.float()
    return total.bfloat16()


def moe_block(
    x: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    selection_bias: Tensor,
    weights: ExpertWeights,
    top_k: int,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The whole block, bfloat16 [tokens, d_model]; experts beyond those that `logits` ranks are shared ones.

    With fp8_block weights of `down`, the activated rows are quantized 1 x 128; otherwise they are rounded to bfloat16.
    """
    experts = weights.gate_up.shape[0]
    selected, slot_weights = route(logits, selection_bias, top_k, experts - logits.shape[1])
    rows = sort_rows(selected, experts, block_m=16)
    hidden = gate_up_swiglu(x, scale, weights.gate_up, weights.gate_up_scale, rows)
    if weights.down_scale is None:
        outputs = expert_linear(hidden.bfloat16(), None, weights.down, None, rows)
    else:
        outputs = expert_linear(*quantize_row_blocks_e4m3(hidden), weights.down, weights.down_scale, rows)
    return combine(outputs.bfloat16(), rows.positions, slot_weights, shared, residual)
