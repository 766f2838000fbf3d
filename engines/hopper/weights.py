"""A model's weights as the kernels take them: each site's codes and scales, shared experts beside the routed ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.engines.hopper.support import RECIPES, check_expert_recipe
from loka_serve.errors import EngineError
from loka_serve.kernels.moe.reference import ExpertWeights
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.layers import BlockNorm, GroupedLinear, Linear, RMSNorm, SparseMoE, SwiGLU
from loka_serve.models.onerec_v2 import Block, OneRecV2
from loka_serve.quantization.methods import SiteMethod


@dataclass(frozen=True)
class Site:
    """One dense linear: weight [N, K]; scale float32 [N] (fp8_row), [N / 128, K / 128] (fp8_block), or None (bf16)."""

    name: str
    recipe: str
    weight: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class DenseFeedForward:
    """SwiGLU: down(silu(gate) * up)."""

    gate_up: Site
    down: Site


@dataclass(frozen=True)
class SparseFeedForward:
    """A mixture of experts.

    Attributes:
        recipe, down_recipe: of the experts' two GEMMs.
        shared: the shared expert where it runs on its own; None where it stands last among `experts`, or is absent.
    """

    router: Site
    selection_bias: Tensor
    experts: ExpertWeights
    recipe: str
    down_recipe: str
    top_k: int
    shared: DenseFeedForward | None


@dataclass(frozen=True)
class LayerWeights:
    """One block; gains are float32 [d_model], or None before a BlockNorm."""

    kv_set: int
    cross_attention_gain: Tensor | None
    query: Site
    cross_output: Site
    self_attention_gain: Tensor | None
    qkv: Site
    self_output: Site
    feed_forward_gain: Tensor | None
    feed_forward: DenseFeedForward | SparseFeedForward


@dataclass(frozen=True)
class ContextWeights:
    """The context processor; tables bfloat16."""

    item_tables: tuple[Tensor, ...]
    feature_tables: tuple[Tensor, ...]
    static: Tensor
    recency: Tensor | None
    segment: Tensor | None
    projection: Site
    gains: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class HopperWeights:
    """Everything that the engine reads from a model."""

    config: OneRecV2Config
    context: ContextWeights
    bos: Tensor
    token_tables: tuple[Tensor, ...]
    layers: tuple[LayerWeights, ...]
    head_gains: tuple[Tensor | None, ...]
    heads: tuple[Site, ...]
    bytes: int


def pack_weights(model: OneRecV2) -> HopperWeights:
    """Take a model apart; its sites lose their weights as they are packed, so that no tensor is held twice.

    Args:
        model: on the device to run on, with plain weights or with methods that keep their codes (`cache_weight=False`).

    Raises:
        EngineError: names a site whose recipe the kernels do not run.
    """
    config = model.config
    context = model.context
    before = _all_tensors_bytes(model)
    packed = HopperWeights(
        config=config,
        context=ContextWeights(
            item_tables=tuple(pack_table(module) for module in context.item_embeddings),
            feature_tables=tuple(pack_table(module) for module in context.feature_embeddings),
            static=context.static.data.bfloat16(),
            recency=pack_table(context.recency_embedding) if config.position_encoding == "recency" else None,
            segment=pack_table(context.segment_embedding) if config.short_term_length else None,
            projection=_site(context.projection, "context.projection"),
            gains=tuple(_gain(norm) for norm in context.norms),
        ),
        bos=model.bos.data.bfloat16(),
        token_tables=tuple(pack_table(module) for module in model.token_embeddings),
        layers=tuple(_layer(layer, f"layers.{index}") for index, layer in enumerate(model.layers)),
        head_gains=tuple(_gain(norm) for norm in model.norms),
        heads=tuple(_site(head, f"heads.{level}") for level, head in enumerate(model.heads)),
        bytes=before,
    )
    return packed


def _all_tensors_bytes(model: OneRecV2) -> int:
    tensors: list[Tensor] = [parameter for parameter in model.parameters() if not parameter.is_meta]
    for site in model.sites().values():
        if site.method is not None:
            tensors += list(_method(site).state.values())
    return sum(tensor.nbytes for tensor in tensors)


def _layer(layer: torch.nn.Module, name: str) -> LayerWeights:
    assert isinstance(layer, Block)
    cross, own = layer.cross_attention, layer.self_attention
    return LayerWeights(
        kv_set=layer.kv_set,
        cross_attention_gain=_gain(layer.cross_attention_norm),
        query=_site(cross.query, f"{name}.cross_attention.query"),
        cross_output=_site(cross.output, f"{name}.cross_attention.output"),
        self_attention_gain=_gain(layer.self_attention_norm),
        qkv=_site(own.qkv, f"{name}.self_attention.qkv"),
        self_output=_site(own.output, f"{name}.self_attention.output"),
        feed_forward_gain=_gain(layer.ffn_norm),
        feed_forward=pack_experts(layer.moe, f"{name}.moe")
        if hasattr(layer, "moe")
        else _dense(layer.mlp, f"{name}.mlp"),
    )


def _dense(module: SwiGLU, name: str) -> DenseFeedForward:
    return DenseFeedForward(_site(module.gate_up, f"{name}.gate_up"), _site(module.down, f"{name}.down"))


def pack_experts(module: SparseMoE, name: str) -> SparseFeedForward:
    """Take a mixture of experts apart, as `pack_weights` does a model; `name` is its path in the model."""
    gate_up_recipe, gate_up, gate_up_scale = _take(module.gate_up, f"{name}.gate_up")
    down_recipe, down, down_scale = _take(module.down, f"{name}.down")
    check_expert_recipe(f"{name}.down", down_recipe)
    shared = None if module.shared is None else _dense(module.shared, f"{name}.shared")
    if shared is not None and _joins(shared, (gate_up_recipe, gate_up), (down_recipe, down)):
        gate_up, gate_up_scale = _join(gate_up, gate_up_scale, shared.gate_up)
        down, down_scale = _join(down, down_scale, shared.down)
        shared = None
    return SparseFeedForward(
        router=_site(module.router, f"{name}.router"),
        selection_bias=module.selection_bias.data.float(),
        experts=ExpertWeights(gate_up, down, gate_up_scale, down_scale),
        recipe=gate_up_recipe,
        down_recipe=down_recipe,
        top_k=module.experts_per_token,
        shared=shared,
    )


def _joins(shared: DenseFeedForward, gate_up: tuple[str, Tensor], down: tuple[str, Tensor]) -> bool:
    """Whether the shared expert looks like one more routed one, so that it runs in the same launches."""
    return all(
        site.recipe == recipe and site.weight.shape == weight.shape[1:]
        for site, (recipe, weight) in ((shared.gate_up, gate_up), (shared.down, down))
    )


def _join(weight: Tensor, scale: Tensor | None, site: Site) -> tuple[Tensor, Tensor | None]:
    # torch.cat of E4M3 goes through bytes, which every build of torch can copy.
    joined = torch.cat([weight.view(torch.uint8), site.weight.view(torch.uint8)[None]]).view(weight.dtype)
    return joined, None if scale is None or site.scale is None else torch.cat([scale, site.scale[None]]).contiguous()


def _site(module: torch.nn.Module, name: str) -> Site:
    assert isinstance(module, Linear)
    return Site(name, *_take(module, name))


def _take(module: Linear | GroupedLinear, name: str) -> tuple[str, Tensor, Tensor | None]:
    """(recipe, weight, scale) of a site, which no longer holds them afterwards."""
    if module.method is None:
        assert module.weight is not None
        weight, module.weight = module.weight.data, None
        return "bf16", weight.bfloat16().contiguous(), None
    recipe, state = _method(module).recipe.name, _method(module).state
    if recipe not in RECIPES:
        raise EngineError(f"site {name}: recipe {recipe}: the hopper engine runs {', '.join(RECIPES)}")
    if "weight" not in state:
        raise EngineError(f"site {name}: its codes were dropped: load the bundle's model with cache_weight=False")
    module.method = None
    scale = state.get("weight_scale")
    return recipe, state["weight"].contiguous(), None if scale is None else scale.float().contiguous()


def _method(module: Linear | GroupedLinear) -> SiteMethod:
    assert isinstance(module.method, SiteMethod)
    return module.method


def pack_table(module: torch.nn.Module) -> Tensor:
    """An embedding's rows in bfloat16."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.data.bfloat16().contiguous()


def _gain(norm: torch.nn.Module) -> Tensor | None:
    if isinstance(norm, BlockNorm):
        return None
    assert isinstance(norm, RMSNorm)
    return norm.weight.data.float()
