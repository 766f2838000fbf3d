"""OneRec-V2: a context processor and a lazy decoder with dense or sparse-MoE blocks (arXiv 2508.20900, section 2).

The decoder's cross-attention has no key and value projections: each context position is projected once, and its chunks
serve, normalised, as keys and values of all layers. `decode_step` runs one SID level for all beams of a batch;
`teacher_forced` runs all levels of many targets against one context, for training and evaluation. Both share one block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka_serve.models.config import OneRecV2Config
from loka_serve.models.layers import Embedding, GroupedLinear, Linear, SparseMoE, SwiGLU, make_norm, rotate


@dataclass
class Context:
    """Keys and values of a batch of user histories, shared by all beams.

    Attributes:
        keys, values: L_kv tensors [B, 1 + T, G_kv, head_dim]. Slot 0 is the static position, slot 1 + j is item j.
        lengths: int64 [B], history items of each row; later slots are padding.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor

    def visible(self, cutoffs: Tensor) -> Tensor:
        """Bool [..., 1 + T]: the static slot and the first `cutoffs` items, for cutoffs of any shape."""
        slots = torch.arange(self.keys[0].shape[1], device=cutoffs.device)
        return slots <= cutoffs[..., None]


@dataclass
class DecodeCache:
    """Self-attention keys and values of the levels decoded so far: a layer's pair of [B, W, level, heads, head_dim]."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            past_keys, past_values = self.layers[layer]
            keys, values = torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)
        self.layers[layer] = (keys, values)
        return keys, values

    def reorder(self, parents: Tensor) -> None:
        """Beam w of each row continues beam parents[b, w]; parents int64 [B, W']."""
        rows = torch.arange(parents.shape[0], device=parents.device)[:, None]
        self.layers = {
            layer: (keys[rows, parents], values[rows, parents]) for layer, (keys, values) in self.layers.items()
        }


class ContextProcessor(nn.Module):
    """User features and history -> keys and values, once a request."""

    def __init__(self, config: OneRecV2Config) -> None:
        super().__init__()
        self.config = config
        width = config.kv_groups * config.head_dim
        self.item_embeddings = nn.ModuleList([Embedding(size, config.d_model) for size in config.codebook_sizes])
        self.feature_embeddings = nn.ModuleList(
            [Embedding(len(feature.values) + 1, config.d_model) for feature in config.features]
        )
        self.static = nn.Parameter(torch.empty(config.d_model))
        if config.position_encoding == "recency":
            self.recency_embedding = Embedding(config.max_context, config.d_model)
        if config.short_term_length:
            self.segment_embedding = Embedding(2, config.d_model)
        self.projection = Linear(config.d_model, config.d_context)
        self.norms = nn.ModuleList(
            [make_norm(config.norm, width, config.norm_eps) for _ in range(config.kv_layers * config.kv_split)]
        )
        self.dropout = nn.Dropout(0.0)

    def forward(self, history: Tensor, lengths: Tensor, features: Tensor) -> Context:
        config = self.config
        positions = torch.arange(history.shape[1], device=history.device)
        embedded = torch.cat([self._static(features)[:, None], self._items(history, lengths, positions)], dim=1)
        chunks = self.projection(self.dropout(embedded)).chunk(config.kv_layers * config.kv_split, dim=-1)
        normed = [
            norm(chunk).unflatten(-1, (config.kv_groups, config.head_dim))
            for norm, chunk in zip(self.norms, chunks, strict=True)
        ]
        keys, values = normed[:: config.kv_split], normed[config.kv_split - 1 :: config.kv_split]
        if config.position_encoding == "rotary":
            # The static slot stays unrotated: queries of all positions see it alike, a place to look when no item fits.
            keys = [
                torch.cat([key[:, :1], rotate(key[:, 1:], positions.expand(key.shape[0], -1), config.rotary_theta)], 1)
                for key in keys
            ]
        return Context(list(keys), list(values), lengths)

    def _static(self, features: Tensor) -> Tensor:
        embedded = self.static.expand(features.shape[0], -1)
        for column, table in enumerate(self.feature_embeddings):
            embedded = embedded + table(features[:, column])
        return embedded

    def _items(self, history: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        embedded = self.item_embeddings[0](history[..., 0])
        for level in range(1, self.config.levels):
            embedded = embedded + self.item_embeddings[level](history[..., level])
        age = (lengths[:, None] - 1 - positions).clamp(0, self.config.max_context - 1)
        if self.config.position_encoding == "recency":
            embedded = embedded + self.recency_embedding(age)
        if self.config.short_term_length:
            embedded = embedded + self.segment_embedding((age < self.config.short_term_length).long())
        return embedded


class CrossAttention(nn.Module):
    """Queries of the decoder over the shared context; only query and output are projected."""

    def __init__(self, config: OneRecV2Config) -> None:
        super().__init__()
        self.config = config
        self.query = Linear(config.d_model, config.heads * config.head_dim, config.linear_bias)
        self.output = Linear(config.heads * config.head_dim, config.d_model, config.linear_bias)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """x [B, N, S, d]; keys, values [B, 1 + T, G, head_dim]; visible bool [B, N or 1, 1 + T]; positions [B, N]."""
        config = self.config
        batch, targets, steps, _ = x.shape
        query = self.query(x).unflatten(-1, (config.heads, config.head_dim))
        if config.position_encoding == "rotary":
            query = rotate(query, positions[:, :, None].expand(-1, -1, steps), config.rotary_theta)
        query = query.reshape(batch, targets * steps, config.heads, config.head_dim)
        mask = visible if visible.shape[1] == 1 else visible.repeat_interleave(steps, dim=1)
        repeat = config.heads // config.kv_groups
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.repeat_interleave(repeat, dim=2).transpose(1, 2).to(query.dtype),
            values.repeat_interleave(repeat, dim=2).transpose(1, 2).to(query.dtype),
            attn_mask=mask[:, None],
        )
        return self.output(attended.transpose(1, 2).reshape(batch, targets, steps, -1))


class SelfAttention(nn.Module):
    """Causal attention over the at most L positions of one beam."""

    def __init__(self, config: OneRecV2Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.qkv = Linear(config.d_model, 3 * config.heads * config.head_dim, config.linear_bias)
        self.output = Linear(config.heads * config.head_dim, config.d_model, config.linear_bias)

    def forward(self, x: Tensor, cache: DecodeCache | None, layer: int) -> Tensor:
        """x [B, N, S, d]. With a cache, S = 1 and all cached levels are visible; without, attention is causal."""
        query, keys, values = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
        if cache is not None:
            keys, values = cache.append(layer, keys, values)
        attended = F.scaled_dot_product_attention(
            query.transpose(2, 3), keys.transpose(2, 3), values.transpose(2, 3), is_causal=cache is None
        )
        return self.output(attended.transpose(2, 3).flatten(-2))


class Block(nn.Module):
    """Pre-norm: cross-attention, self-attention, feed-forward (dense SwiGLU or mixture of experts)."""

    def __init__(self, config: OneRecV2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.kv_set = layer * config.kv_layers // config.layers
        self.cross_attention_norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.cross_attention = CrossAttention(config)
        self.self_attention_norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.self_attention = SelfAttention(config)
        self.ffn_norm = make_norm(config.norm, config.d_model, config.norm_eps)
        if config.is_sparse(layer):
            self.moe = SparseMoE(
                config.d_model,
                config.experts,
                config.experts_per_token,
                config.expert_width,
                config.shared_experts,
                config.activation,
                config.linear_bias,
            )
        else:
            self.mlp = SwiGLU(config.d_model, config.d_ff, config.activation, config.linear_bias)
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, x: Tensor, context: Context, visible: Tensor, positions: Tensor, cache: DecodeCache | None
    ) -> Tensor:
        keys, values = context.keys[self.kv_set], context.values[self.kv_set]
        x = x + self.dropout(self.cross_attention(self.cross_attention_norm(x), keys, values, visible, positions))
        x = x + self.dropout(self.self_attention(self.self_attention_norm(x), cache, self.layer))
        ffn = self.moe if hasattr(self, "moe") else self.mlp
        return x + self.dropout(ffn(self.ffn_norm(x)))


class OneRecV2(nn.Module):
    """The whole model. Construct under `torch.device("meta")` to count or to load weights into."""

    def __init__(self, config: OneRecV2Config) -> None:
        super().__init__()
        self.config = config
        self.context = ContextProcessor(config)
        self.bos = nn.Parameter(torch.empty(config.d_model))
        self.token_embeddings = nn.ModuleList([Embedding(size, config.d_model) for size in config.codebook_sizes[:-1]])
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.layers)])
        self.norms = nn.ModuleList(
            [make_norm(config.norm, config.d_model, config.norm_eps) for _ in config.codebook_sizes]
        )
        self.heads = nn.ModuleList([Linear(config.d_model, size) for size in config.codebook_sizes])

    def sites(self) -> dict[str, Linear | GroupedLinear]:
        """Every GEMM of the model by name, in the order of execution within a block."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Linear | GroupedLinear)}

    def initialize(self, seed: int) -> OneRecV2:
        """Random weights: linear sites N(0, 1 / in_features), embeddings N(0, 1), norms 1. Returns self."""
        generator = torch.Generator().manual_seed(seed)
        sites = {f"{name}.weight" for name in self.sites()}
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1 and name not in ("bos", "context.static"):
                continue  # norm gains and selection biases keep their neutral values
            scale = parameter.shape[-1] ** -0.5 if name in sites else 1.0
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        return self

    def prepare_context(self, history: Tensor, lengths: Tensor, features: Tensor) -> Context:
        """Encode users once.

        Args:
            history: int64 [B, T, L] SID codes, oldest first, padded at the end with any valid code; T may be 0.
            lengths: int64 [B], items of each row.
            features: int64 [B, F], index of each static feature, 0 for unknown.
        """
        return self.context(history, lengths, features)

    def decode_step(self, tokens: Tensor | None, level: int, context: Context, cache: DecodeCache) -> Tensor:
        """Hidden states of one level for all beams.

        Args:
            tokens: int64 [B, W], the code chosen at `level - 1` by each beam; None at level 0, where W = 1.
            cache: self-attention state, already reordered to these beams; extended in place.

        Returns:
            [B, W, d_model], input of `level_logits`.
        """
        if tokens is None:
            x = self.bos.expand(context.lengths.shape[0], 1, -1)
        else:
            x = self.token_embeddings[level - 1](tokens)
        visible = context.visible(context.lengths)[:, None]
        positions = context.lengths[:, None].expand(-1, x.shape[1])
        x = x[:, :, None]
        for layer in self.layers:
            x = layer(x, context, visible, positions, cache)
        return x[:, :, 0]

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """Float32 logits [..., V_level] over the whole codebook of a level."""
        return self.heads[level](self.norms[level](hidden)).float()

    def teacher_forced(self, context: Context, targets: Tensor, cutoffs: Tensor) -> list[Tensor]:
        """Logits of every level given the true earlier codes.

        Args:
            targets: int64 [B, N, L], N target items a context.
            cutoffs: int64 [B, N]; target n of row b sees the first cutoffs[b, n] history items. With the `recency`
                encoding a context holds for one time only, so cutoffs must equal the lengths.

        Returns:
            L float32 tensors [B, N, V_l].
        """
        if self.config.position_encoding == "recency" and not torch.equal(
            cutoffs, context.lengths[:, None].expand_as(cutoffs)
        ):
            raise ValueError("cutoffs below the history length need position_encoding = rotary")
        steps = [self.bos.expand(*targets.shape[:2], -1)]
        steps += [table(targets[..., level]) for level, table in enumerate(self.token_embeddings)]
        x = torch.stack(steps, dim=2)
        visible = context.visible(cutoffs)
        for layer in self.layers:
            x = layer(x, context, visible, cutoffs, None)
        return [self.level_logits(x[:, :, level], level) for level in range(self.config.levels)]


def count_parameters(config: OneRecV2Config) -> tuple[int, int]:
    """(all, active) parameters of a configuration; active leaves out embeddings and the experts that a token skips."""
    with torch.device("meta"):
        model = OneRecV2(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    tables = [module for module in model.modules() if isinstance(module, Embedding)]
    expert_sites = [site for site in model.sites().values() if isinstance(site, GroupedLinear)]
    skipped_experts = config.experts - config.experts_per_token
    embeddings = sum(table.weight.numel() for table in tables)
    skipped = sum(skipped_experts * site.in_features * site.out_features for site in expert_sites)
    return total, total - embeddings - skipped
