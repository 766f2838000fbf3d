"""The operations on a Hopper GPU: the hopper engine's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.engines.hopper.activations import Producers, input_recipes
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.selection import select
from loka_serve.engines.hopper.weights import pack_experts, pack_table
from loka_serve.kernels.beam_attention.reference import Fp8Context
from loka_serve.kernels.beam_attention.triton import beam_attention, beam_attention_fp8
from loka_serve.kernels.beam_attention.triton_context import quantize_context
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.kernels.embed_context.triton import embed_context, embed_static
from loka_serve.kernels.level_head.reference import AdvancedBeams, AllowedNodes, TrieLevel
from loka_serve.kernels.moe.combine import combine
from loka_serve.kernels.rotary.triton import rotate_keys, rotate_queries
from loka_serve.kernels.self_attention.triton import extend_ancestors, self_attention
from loka_serve.models.layers import SparseMoE
from loka_serve.models.onerec_v2 import OneRecV2


class KernelOperations:
    """Takes what its operations need out of a model, which is of no use afterwards."""

    dtype = torch.bfloat16

    def __init__(self, model: OneRecV2, dispatch: Dispatch, options: HopperOptions) -> None:
        config, context = model.config, model.context
        self.options, self.short_term_length = options, config.short_term_length
        self.produce = Producers(dispatch, options.batch_invariant, config.norm_eps, options.fused, config.activation)
        self.item_tables = tuple(pack_table(module) for module in context.item_embeddings)
        self.feature_tables = tuple(pack_table(module) for module in context.feature_embeddings)
        self.static = context.static.data.bfloat16()
        self.recency = pack_table(context.recency_embedding) if config.position_encoding == "recency" else None
        self.segment = pack_table(context.segment_embedding) if config.short_term_length else None
        self.moe = {}
        for index, layer in enumerate(model.layers):
            if config.is_sparse(index):
                assert isinstance(layer.moe, SparseMoE)
                self.moe[index] = pack_experts(layer.moe, f"layers.{index}.moe")
        tables = sum(table.nbytes for table in (*self.item_tables, *self.feature_tables))
        self.weight_bytes = tables + sum(
            weights.experts.gate_up.nbytes + weights.experts.down.nbytes for weights in self.moe.values()
        )

    def embed_context(self, history: Tensor, lengths: Tensor, features: Tensor) -> Tensor:
        static = embed_static(features, self.feature_tables, self.static)
        tables = (self.item_tables, static, self.recency, self.segment)
        return embed_context(history, lengths, *tables, self.short_term_length)

    def rotate_keys(self, keys: Tensor, theta: float) -> Tensor:
        return rotate_keys(keys, theta)

    def context_form(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor] | Fp8Context:
        if self.options.context_precision == "fp8":
            return quantize_context(keys, values, slots)
        return keys, values

    def beam_attention(
        self,
        query: Tensor,
        context: tuple[Tensor, Tensor] | Fp8Context,
        lengths: Tensor,
        slots: Tensor,
        counts: Tensor,
        theta: float,
    ) -> Tensor:
        query = rotate_queries(query, lengths, theta) if theta else query
        out = torch.empty_like(query)  # rows of dead beams stay undefined
        if isinstance(context, Fp8Context):
            beam_attention_fp8(query, context, slots, counts, out=out)
        else:
            beam_attention(query, *context, slots, counts, out=out)
        return out

    def self_attention(
        self,
        qkv: Tensor,
        cache: tuple[Tensor, Tensor],
        ancestors: Tensor | None,
        counts: Tensor,
        level: int,
    ) -> Tensor:
        out = torch.empty(*qkv.shape[:2], *qkv.shape[3:], dtype=qkv.dtype, device=qkv.device)
        self_attention(qkv, *cache, ancestors, counts, level, out=out)
        return out

    def experts(self, layer: int, normed: Tensor, residual: Tensor) -> Tensor:
        weights = self.moe[layer]
        activation = self.produce.quantized(normed, input_recipes(weights))
        (outputs, positions, slot_weights), shared = self.produce.experts(weights, activation)
        return combine(outputs, positions, slot_weights, shared, residual)

    def select(
        self,
        logits: Tensor,
        beams: AdvancedBeams | None,
        counts: Tensor,
        children: TrieLevel | None,
        allowed: AllowedNodes | None,
        widths: Tensor,
        k: int,
        capacity: int | None,
        is_last: bool,
    ) -> AdvancedBeams:
        return select(logits, beams, counts, children, allowed, widths, k, capacity, is_last, self.options)

    def extend_ancestors(self, previous: Tensor | None, parents: Tensor) -> Tensor:
        return extend_ancestors(previous, parents)
