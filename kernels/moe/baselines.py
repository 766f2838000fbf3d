"""The same work by libraries, for the benchmark: eager PyTorch with its grouped GEMMs, and DeepGEMM where installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3
from ..swiglu_quantize.triton import swiglu_quantize
from .reference import ExpertWeights
from .routing import sort_rows
from .workload import EXPERTS, ROUTED, SLOTS, TOP_K, Batch

Timed = tuple[str, Callable[..., object], list[tuple[Any, ...]]]
"""A library's name, what to call, and the arguments of each call."""


def torch_route(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Sigmoid, topk, normalise."""
    scores = torch.sigmoid(logits.float())
    selected = (scores + bias).topk(TOP_K, dim=-1).indices
    weights = scores.gather(1, selected)
    return selected, weights / weights.sum(-1, keepdim=True)


def torch_sort(selected: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The tokens of all rows sorted by expert, and where each expert's rows end: int64 [rows], int32 [experts]."""
    flat = selected.flatten().long()
    counts = torch.zeros(experts, device=flat.device, dtype=torch.int32)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return flat.argsort(stable=True) // selected.shape[1], counts.cumsum(0).to(torch.int32)


def torch_block(x: Tensor, logits: Tensor, bias: Tensor, weights: ExpertWeights, residual: Tensor) -> Tensor:
    """A BF16 block with its shared expert, as eager PyTorch writes it."""
    gate, up = (x @ weights.gate_up[ROUTED].T).chunk(2, -1)
    out = residual + (F.silu(gate) * up) @ weights.down[ROUTED].T
    selected, slot_weights = torch_route(logits, bias)
    order = selected.flatten().argsort(stable=True)
    tokens, ends = torch_sort(selected, ROUTED)
    hidden = _gate_up(x, tokens, ends, weights.gate_up[:ROUTED])
    outputs = torch._grouped_mm(hidden, weights.down[:ROUTED].transpose(-2, -1), offs=ends)
    return out.index_add_(0, tokens, outputs * slot_weights.flatten()[order, None].to(outputs.dtype))


def bf16_baselines(op: str, batches: list[tuple[Batch]], weights: ExpertWeights) -> Iterator[Timed]:
    """torch._grouped_mm at the work of moe_gate_up, moe_down or moe_block."""
    if op == "moe_block":
        inputs: list[tuple[Any, ...]] = [(b.x, b.logits, b.bias, weights, b.residual) for (b,) in batches]
        yield "torch eager, _grouped_mm", torch_block, inputs
        return
    sorts = [torch_sort(b.routing.selected, EXPERTS) for (b,) in batches]
    inputs = [(b.x, *given, weights.gate_up) for (b,), given in zip(batches, sorts, strict=True)]
    if op == "moe_gate_up":
        yield "torch gather, _grouped_mm, SwiGLU", _gate_up, inputs
    else:
        weight = weights.down.transpose(-2, -1)
        hidden = [(_gate_up(*given), given[2]) for given in inputs]
        yield "torch._grouped_mm", lambda rows, ends: torch._grouped_mm(rows, weight, offs=ends), hidden


def fp8_baselines(op: str, batches: list[tuple[Batch]], weights: ExpertWeights) -> Iterator[Timed]:
    """Of moe_gate_up and moe_down: torch's row-scaled grouped GEMM, and DeepGEMM's contiguous one alone."""
    if op == "moe_block":
        return
    gate_up = op == "moe_gate_up"
    weight, weight_scale = (weights.gate_up, weights.gate_up_scale) if gate_up else (weights.down, weights.down_scale)
    channel_scale = torch.full(weight.shape[:2], 0.01, device=weight.device)

    def row_scaled(codes: Tensor, scale: Tensor, tokens: Tensor, ends: Tensor) -> object:
        if gate_up:
            codes, scale = codes.view(torch.uint8)[tokens].view(codes.dtype), scale[tokens]
        out = torch._scaled_grouped_mm(
            codes, weight.transpose(-2, -1), scale, channel_scale, offs=ends, out_dtype=torch.bfloat16
        )
        return swiglu_quantize(out, block_scales=False) if gate_up else out

    tokens = len(batches[0][0].x)
    rows = torch.randn(tokens if gate_up else tokens * SLOTS, weight.shape[2], device=weight.device)
    sorts = [torch_sort(b.routing.selected, EXPERTS) for (b,) in batches]
    name = "torch gather, _scaled_grouped_mm, SwiGLU" if gate_up else "torch._scaled_grouped_mm"
    yield name, row_scaled, [(*quantize_rows_e4m3(rows), *given) for given in sorts]

    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError:
        return
    padded = [sort_rows(b.routing, EXPERTS, 128) for (b,) in batches]
    rows = torch.randn(len(padded[0].tokens), weight.shape[2], device=weight.device)
    out = rows.new_empty(len(rows), weight.shape[1], dtype=torch.bfloat16)

    def contiguous(codes: Tensor, scale: Tensor, experts: Tensor) -> object:
        return deep_gemm.m_grouped_fp8_gemm_nt_contiguous((codes, scale), (weight, weight_scale), out, experts)

    codes, scale = quantize_row_blocks_e4m3(rows)
    scale = scale.T.contiguous().T
    inputs = [(codes.clone(), scale, given.expert_of_block.repeat_interleave(128)) for given in padded]
    yield "DeepGEMM contiguous, GEMM alone", contiguous, inputs


def _gate_up(x: Tensor, tokens: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    gate, up = torch._grouped_mm(x[tokens], weight.transpose(-2, -1), offs=ends).chunk(2, -1)
    return F.silu(gate) * up
