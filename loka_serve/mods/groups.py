"""Which channels of OneRec-V2 can be scaled, and all that must be scaled with them."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.mods.channels import ChannelGroup, Part


def channel_groups(model: OneRecV2) -> list[ChannelGroup]:
    """Every group of a model, in the order of execution.

    A norm's output may feed several linears, which are scaled together: the one before a sparse layer feeds the router,
    the routed and the shared experts. Not among them: the gain of the keys (no GEMM reads keys; its scale would go into
    the queries' rows and change no site's input), and BlockNorms, which have no parameter to scale.
    """
    groups = [_context_input(model), *_context_values(model)]
    for index in range(model.config.layers):
        groups += _layer(model, f"layers.{index}", model.config.is_sparse(index))
    groups += [_norm(model, f"norms.{level}", [f"heads.{level}"]) for level in range(model.config.levels)]
    return [group for group in groups if group is not None]


def _layer(model: OneRecV2, name: str, sparse: bool) -> list[ChannelGroup | None]:
    config = model.config
    attended = config.heads * config.head_dim
    if sparse:
        inner = [f"{name}.moe.router", f"{name}.moe.gate_up"]
        blocks = [_hidden(model, f"{name}.moe", config.expert_width, experts=config.experts)]
        if config.shared_experts:
            inner.append(f"{name}.moe.shared.gate_up")
            blocks.append(_hidden(model, f"{name}.moe.shared", config.shared_experts * config.expert_width))
    else:
        inner, blocks = [f"{name}.mlp.gate_up"], [_hidden(model, f"{name}.mlp", config.d_ff)]
    own = f"{name}.self_attention"
    rows = _with_bias(model, f"{own}.qkv", 2 * attended, torch.arange(attended))
    values = ChannelGroup(f"{own}.qkv", (attended,), (*rows, _columns(f"{own}.output", torch.arange(attended))))
    return [
        _norm(model, f"{name}.cross_attention_norm", [f"{name}.cross_attention.query"]),
        _norm(model, f"{name}.self_attention_norm", [f"{own}.qkv"]),
        values,
        _norm(model, f"{name}.ffn_norm", inner),
        *blocks,
    ]


def _norm(model: OneRecV2, name: str, readers: list[str]) -> ChannelGroup | None:
    if model.config.norm != "rms":
        return None
    gain, channels = f"{name}.weight", torch.arange(model.config.d_model)
    parts = [Part(gain, -1, 0, channels, False), *(_columns(site, channels) for site in readers)]
    return ChannelGroup(name, (len(channels),), tuple(parts), gain)


def _hidden(model: OneRecV2, name: str, width: int, experts: int = 0) -> ChannelGroup:
    """Hidden units of a SwiGLU: `up` is linear in its rows, whatever activates the gate."""
    channels = torch.arange(width)
    parts = (*_with_bias(model, f"{name}.gate_up", width, channels), _columns(f"{name}.down", channels))
    return ChannelGroup(f"{name}.gate_up", (experts, width) if experts else (width,), parts)


def _context_values(model: OneRecV2) -> list[ChannelGroup | None]:
    """Values of the context, which the layers of one set share; attention is linear in them.

    Where keys serve as values, the queries' rows take the scale too, and two channels that a rotation mixes take one.
    """
    config = model.config
    if config.norm != "rms":
        return []
    width, repeat = config.kv_groups * config.head_dim, config.heads // config.kv_groups
    # Query head h reads group h // repeat.
    channels = torch.arange(width).view(config.kv_groups, 1, config.head_dim).expand(-1, repeat, -1).flatten()
    both = config.kv_split == 1
    groups: list[ChannelGroup | None] = []
    for kv_set in range(config.kv_layers):
        layers = [layer for layer in range(config.layers) if layer * config.kv_layers // config.layers == kv_set]
        name = f"context.norms.{(kv_set + 1) * config.kv_split - 1}"
        parts = [Part(f"{name}.weight", -1, 0, torch.arange(width), False)]
        for layer in layers:
            parts.append(_columns(f"layers.{layer}.cross_attention.output", channels))
            if both:
                query = f"layers.{layer}.cross_attention.query"
                parts += _with_bias(model, query, 0, channels, multiplied=True)
        ties = _rotary_pairs(width, config.head_dim) if both and config.position_encoding == "rotary" else None
        groups.append(ChannelGroup(name, (width,), tuple(parts), f"{name}.weight", ties))
    return groups


def _context_input(model: OneRecV2) -> ChannelGroup:
    """The embeddings that are added up before the context's projection."""
    channels = torch.arange(model.config.d_model)
    tables = [
        name
        for name, _ in model.named_parameters()
        if name == "context.static" or (name.startswith("context.") and "embedding" in name)
    ]
    parts = [*(Part(table, -1, 0, channels, False) for table in tables), _columns("context.projection", channels)]
    return ChannelGroup("context.embeddings", (len(channels),), tuple(parts))


def _columns(site: str, channels: Tensor) -> Part:
    return Part(f"{site}.weight", -1, 0, channels, True)


def _with_bias(model: OneRecV2, site: str, start: int, channels: Tensor, multiplied: bool = False) -> list[Part]:
    """Rows of a site from `start` on, and the same entries of its bias."""
    parts = [Part(f"{site}.weight", -2, start, channels, multiplied)]
    if getattr(model.get_submodule(site), "bias", None) is not None:
        parts.append(Part(f"{site}.bias", -1, start, channels, multiplied))
    return parts


def _rotary_pairs(width: int, head_dim: int) -> Tensor:
    channels = torch.arange(width)
    return channels // head_dim * head_dim + channels % (head_dim // 2)
