"""The model on the device: context once a request, then one decode step a level. Nothing here waits for the device.

Rows of a step are [batch * beams]; rows of requests with fewer beams compute on what is there and are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.engines.hopper.activations import Activation, Producers, input_recipes
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.weights import DenseFeedForward, HopperWeights, LayerWeights, SparseFeedForward
from loka_serve.kernels.batch_invariant import ATTENTION
from loka_serve.kernels.beam_attention.reference import Fp8Context
from loka_serve.kernels.beam_attention.triton import beam_attention, beam_attention_fp8
from loka_serve.kernels.beam_attention.triton_context import quantize_context
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.kernels.embed_context.triton import embed_context, embed_context_quantize, embed_static
from loka_serve.kernels.rotary.triton import rotate_keys, rotate_queries
from loka_serve.kernels.self_attention.triton import self_attention, self_attention_quantize


@dataclass(frozen=True)
class ContextKeys:
    """One set of keys and values, bfloat16 [batch, slots, groups, head_dim], or their E4M3 form.

    Attributes:
        slots: int32 [batch], visible slots, 0 where there is no request.
        positions: int32 [batch], history items, which is the position of the queries.
    """

    keys: Tensor
    values: Tensor
    quantized: Fp8Context | None
    slots: Tensor
    positions: Tensor


@dataclass(frozen=True)
class SelfAttentionCache:
    """Keys and values of the levels but the last, bfloat16 [layers, levels - 1, batch, beams, heads, head_dim]."""

    keys: Tensor
    values: Tensor


class Forward:
    """Launches the kernels of context processing and of a decode step."""

    def __init__(self, weights: HopperWeights, dispatch: Dispatch, options: HopperOptions) -> None:
        self.weights, self.config, self.options = weights, weights.config, options
        self.attention = ATTENTION if options.batch_invariant else None
        self.produce = Producers(
            dispatch, options.batch_invariant, weights.config.norm_eps, options.fused, weights.config.activation
        )

    def context(self, history: Tensor, lengths: Tensor, features: Tensor) -> list[ContextKeys]:
        """Encode histories: int32 [B, T, L], lengths int32 [B] (-1: no request there), features int32 [B, F]."""
        config, weights = self.config, self.weights.context
        batch, items, _ = history.shape
        lengths_of_items = lengths.clamp(min=0)
        static = embed_static(features, weights.feature_tables, weights.static)
        arguments = (history, lengths_of_items, weights.item_tables, static, weights.recency, weights.segment)
        recipe = weights.projection.recipe
        if recipe == "bf16" or not self.options.fused:
            embedded = self.produce.quantized(embed_context(*arguments, config.short_term_length), {recipe})
        else:
            block_scales = recipe == "fp8_block"
            embedded = Activation(
                {recipe: embed_context_quantize(*arguments, config.short_term_length, block_scales=block_scales)}
            )
        projected = self.produce.project(embedded, weights.projection)
        chunks = projected.chunk(config.kv_layers * config.kv_split, dim=1)
        normed = [self._heads(chunk, gain, batch, items + 1) for chunk, gain in zip(chunks, weights.gains, strict=True)]
        keys, values = normed[:: config.kv_split], normed[config.kv_split - 1 :: config.kv_split]
        if config.position_encoding == "rotary":
            keys = [rotate_keys(key, config.rotary_theta) for key in keys]
        slots = (lengths + 1).to(torch.int32)
        return [self._keys(key, value, slots, lengths_of_items) for key, value in zip(keys, values, strict=True)]

    def _heads(self, chunk: Tensor, gain: Tensor | None, batch: int, slots: int) -> Tensor:
        _, normed = self.produce.norm(chunk.contiguous(), None, gain, {"bf16"})
        return normed.of("bf16")[0].view(batch, slots, self.config.kv_groups, self.config.head_dim)

    def _keys(self, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> ContextKeys:
        quantized = quantize_context(keys, values, slots) if self.options.context_precision == "fp8" else None
        return ContextKeys(keys, values, quantized, slots, positions)

    def new_cache(self, batch: int, beams: int) -> SelfAttentionCache:
        config = self.config
        shape = (config.layers, config.levels - 1, batch, beams, config.heads, config.head_dim)
        device = self.weights.bos.device
        return SelfAttentionCache(
            torch.empty(shape, dtype=torch.bfloat16, device=device),
            torch.empty(shape, dtype=torch.bfloat16, device=device),
        )

    def step(
        self,
        codes: Tensor | None,
        level: int,
        context: list[ContextKeys],
        cache: SelfAttentionCache,
        ancestors: Tensor | None,
        beam_counts: Tensor,
    ) -> Tensor:
        """Logits of one level, float32 [B * W, V].

        Args:
            codes: int32 [B, W], the code of each beam at the level before; None at level 0, where W = 1.
            ancestors: int32 [B, W, level], places of each beam's past in the cache.
            beam_counts: int32 [B], live beams of each request.
        """
        weights = self.weights
        batch = len(beam_counts)
        if codes is None:
            x = weights.bos.expand(batch, -1).contiguous()
        else:
            x = weights.token_tables[level - 1].index_select(0, codes.reshape(-1))
        first = weights.layers[0]
        x, normed = self.produce.norm(x, None, first.cross_attention_gain, {first.query.recipe})
        for index, layer in enumerate(weights.layers):
            if index + 1 < len(weights.layers):
                following = weights.layers[index + 1]
                gain, recipe = following.cross_attention_gain, following.query.recipe
            else:
                gain, recipe = weights.head_gains[level], weights.heads[level].recipe
            keys = context[layer.kv_set]
            x, normed = self._cross_attention(layer, x, normed, keys, beam_counts)
            past = (cache.keys[index], cache.values[index])
            x, normed = self._self_attention(layer, x, normed, past, ancestors, beam_counts, level)
            x, normed = self._feed_forward(layer.feed_forward, x, normed, gain, recipe)
        return self.produce.project(normed, weights.heads[level], torch.float32)

    def _cross_attention(
        self, layer: LayerWeights, x: Tensor, normed: Activation, context: ContextKeys, beam_counts: Tensor
    ) -> tuple[Tensor, Activation]:
        config = self.config
        query = self.produce.project(normed, layer.query)
        query = query.view(len(beam_counts), -1, config.heads, config.head_dim)
        if config.position_encoding == "rotary":
            query = rotate_queries(query, context.positions, config.rotary_theta)
        out = torch.empty_like(query)  # rows of dead beams stay undefined
        if context.quantized is None:
            operands = (query, context.keys, context.values, context.slots, beam_counts)
            beam_attention(*operands, out=out, configuration=self.attention)
        else:
            operands_fp8 = (query, context.quantized, context.slots, beam_counts)
            beam_attention_fp8(*operands_fp8, out=out, configuration=self.attention)
        attended = self.produce.quantized(out.view(len(x), -1), {layer.cross_output.recipe})
        output = self.produce.project(attended, layer.cross_output)
        return self.produce.norm(output, x, layer.self_attention_gain, {layer.qkv.recipe})

    def _self_attention(
        self,
        layer: LayerWeights,
        x: Tensor,
        normed: Activation,
        past: tuple[Tensor, Tensor],
        ancestors: Tensor | None,
        beam_counts: Tensor,
        level: int,
    ) -> tuple[Tensor, Activation]:
        config, recipe = self.config, layer.self_output.recipe
        rows, width = len(x), config.heads * config.head_dim
        qkv = self.produce.project(normed, layer.qkv).view(len(beam_counts), -1, 3, config.heads, config.head_dim)
        arguments = (qkv, *past, ancestors, beam_counts, level)
        fits = recipe == "fp8_row" or (recipe == "fp8_block" and config.head_dim == 128)
        if self.options.fused and fits:
            codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
            quantized = self_attention_quantize(*arguments, block_scales=recipe == "fp8_block", out=codes)
            attended = Activation({recipe: quantized})
        else:
            out = torch.empty(qkv.shape[0], qkv.shape[1], *qkv.shape[3:], dtype=qkv.dtype, device=x.device)
            self_attention(*arguments, out=out)
            attended = self.produce.quantized(out.view(rows, width), {recipe})
        output = self.produce.project(attended, layer.self_output)
        return self.produce.norm(output, x, layer.feed_forward_gain, input_recipes(layer.feed_forward))

    def _feed_forward(
        self,
        weights: DenseFeedForward | SparseFeedForward,
        x: Tensor,
        normed: Activation,
        next_gain: Tensor | None,
        next_recipe: str,
    ) -> tuple[Tensor, Activation]:
        if isinstance(weights, DenseFeedForward):
            return self.produce.norm(self.produce.dense(weights, normed), x, next_gain, {next_recipe})
        experts, shared = self.produce.experts(weights, normed)
        return self.produce.combine_norm(experts, shared, x, next_gain, next_recipe)
