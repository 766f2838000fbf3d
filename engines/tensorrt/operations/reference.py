"""The operations on the CPU: the kernels' references, and the reference model's experts, all in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.kernels.beam_attention.reference import beam_attention
from loka_serve.kernels.embed_context.reference import embed_context, embed_static
from loka_serve.kernels.level_head.reference import (
    AdvancedBeams,
    AllowedNodes,
    TrieLevel,
    advance_beams,
    score_candidates,
    topk,
)
from loka_serve.kernels.rotary.reference import rotate_keys, rotate_queries
from loka_serve.kernels.self_attention.reference import extend_ancestors, self_attention
from loka_serve.models.layers import Embedding, SparseMoE
from loka_serve.models.onerec_v2 import OneRecV2


class ReferenceOperations:
    """Keeps of a model what its operations need; the model's other sites can be dropped."""

    dtype = torch.float32

    def __init__(self, model: OneRecV2) -> None:
        config, context = model.config, model.context
        self.short_term_length = config.short_term_length
        self.item_tables = [_table(module) for module in context.item_embeddings]
        self.feature_tables = [_table(module) for module in context.feature_embeddings]
        self.static = context.static.data
        self.recency = _table(context.recency_embedding) if config.position_encoding == "recency" else None
        self.segment = _table(context.segment_embedding) if config.short_term_length else None
        self.moe: dict[int, torch.nn.Module] = {}
        for index, layer in enumerate(model.layers):
            if config.is_sparse(index):
                assert isinstance(layer.moe, SparseMoE)
                self.moe[index] = layer.moe
        tables = [*self.item_tables, *self.feature_tables]
        parameters = [parameter for moe in self.moe.values() for parameter in moe.parameters()]
        self.weight_bytes = sum(tensor.nbytes for tensor in (*tables, *parameters))

    def embed_context(self, history: Tensor, lengths: Tensor, features: Tensor) -> Tensor:
        static = embed_static(features, self.feature_tables, self.static)
        tables = (self.item_tables, static, self.recency, self.segment)
        return embed_context(history, lengths, *tables, self.short_term_length)

    def rotate_keys(self, keys: Tensor, theta: float) -> Tensor:
        return rotate_keys(keys, theta)

    def context_form(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    def beam_attention(
        self,
        query: Tensor,
        context: tuple[Tensor, Tensor],
        lengths: Tensor,
        slots: Tensor,
        counts: Tensor,
        theta: float,
    ) -> Tensor:
        query = rotate_queries(query, lengths, theta) if theta else query
        return beam_attention(query, *context, slots, counts)

    def self_attention(
        self,
        qkv: Tensor,
        cache: tuple[Tensor, Tensor],
        ancestors: Tensor | None,
        counts: Tensor,
        level: int,
    ) -> Tensor:
        return self_attention(qkv, *cache, ancestors, counts, level)

    def experts(self, layer: int, normed: Tensor, residual: Tensor) -> Tensor:
        return residual + self.moe[layer](normed)

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
        nodes = torch.zeros(len(counts), 1, dtype=torch.int32) if beams is None else beams.nodes
        scores, failed = (None, None) if beams is None else (beams.scores, beams.failed)
        # The table is dense whatever the capacity: a compact one is taken from it here.
        candidates = score_candidates(logits, scores, counts, children, nodes, allowed)
        values, indices = topk(candidates, k, widths)
        return advance_beams(values, indices, logits.shape[1], children, nodes, not is_last, failed)

    def extend_ancestors(self, previous: Tensor | None, parents: Tensor) -> Tensor:
        return extend_ancestors(previous, parents)


def _table(module: torch.nn.Module) -> Tensor:
    assert isinstance(module, Embedding)
    return module.weight.data
