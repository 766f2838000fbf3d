"""Padding, fusing and layout: shapes change, answers do not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from loka_serve.engines.hopper.weights import SparseFeedForward, pack_weights
from loka_serve.models.checkpoint import load_checkpoint, save_checkpoint
from loka_serve.mods.names import EXACT_MODS, MOD_NAMES, OFFERED_MODS, parse_mods
from loka_serve.mods.pad_widths import padded_width
from loka_serve.mods.registry import MODS, apply_mods, revert
from loka_serve.mods.workspace import Workspace
from loka_serve.quantization.apply import apply_plan
from loka_serve.quantization.plan import PrecisionPlan
from tests.mods.models import TINY, answers, assert_same, make_model, parameters, workspace

UNEVEN = dataclasses.replace(TINY, d_ff=120, expert_width=240, shared_experts=2, linear_bias=True)


def test_inner_widths_are_padded_to_multiples_of_128(tmp_path: Path) -> None:
    model = make_model(UNEVEN)
    expected, before = answers(model), parameters(model)
    rewrites = apply_mods(workspace(model), ["pad_widths"])
    assert [(rewrite.target, rewrite.detail) for rewrite in rewrites] == [
        ("config d_ff", "120 -> 128"),
        ("config expert_width", "240 -> 256"),
    ]
    assert model.layers[0].mlp.gate_up.weight.shape == (256, 64)
    assert model.layers[1].moe.down.weight.shape == (8, 64, 256)
    assert model.layers[1].moe.shared.gate_up.bias.shape == (2 * 2 * 256,)
    for found, wanted in zip(answers(model), expected, strict=True):
        # Zeros are added, but longer sums may run in another order; logits have a deviation near 3.
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=1e-4)
    save_checkpoint(model, tmp_path)  # the configuration has become that of the padded model
    for found, wanted in zip(answers(load_checkpoint(tmp_path)), answers(model), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)  # BLAS sums by the memory's alignment
    revert(rewrites)
    assert model.config == UNEVEN
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())


def test_padding_stays_cheap() -> None:
    assert [padded_width(width) for width in (0, 1408, 1400, 64, 112, 120, 5888, 130)] == [
        *(0, 1408, 1408, 64, 112, 128, 5888, 130)
    ]


def test_fused_projections_are_told() -> None:
    apart = {"layers.0.mlp.gate_up.weight": ("layers.0.mlp.gate.weight", "layers.0.mlp.up.weight")}
    model = make_model(TINY)
    (rewrite,) = apply_mods(Workspace(model, {}, (), apart), ["fuse_projections"])
    assert (rewrite.target, rewrite.detail) == ("layers.0.mlp.gate_up.weight", "gate + up")


def test_weights_lie_as_engines_read_them() -> None:
    model = make_model(TINY, torch.bfloat16)
    expected = answers(model)
    down = model.layers[0].mlp.down
    assert down.weight is not None
    down.weight.data = down.weight.data.T.contiguous().T
    rewrites = apply_mods(workspace(model), ["layout"])
    assert [rewrite.target for rewrite in rewrites] == ["layers.0.mlp.down"]
    assert down.weight.is_contiguous()
    assert_same(answers(model), expected)
    revert(rewrites)
    assert down.weight.stride() == (1, 64)
    assert apply_mods(workspace(model), ["layout"])[0].target == "layers.0.mlp.down"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_the_hopper_engine_takes_stored_weights_as_they_are(recipe: str) -> None:
    """No copy, hence no transposition or quantization, between what a bundle stores and what kernels read."""
    model = make_model(dataclasses.replace(TINY, shared_experts=0), torch.bfloat16)
    apply_mods(workspace(model), EXACT_MODS)
    sites = model.sites()
    apply_plan(model, PrecisionPlan.uniform(sites, recipe), cache_weight=False)
    stored = {name: site.method.state["weight"].data_ptr() for name, site in sites.items()}  # type: ignore[union-attr]
    packed = pack_weights(model)
    layer = packed.layers[1]
    assert isinstance(layer.feed_forward, SparseFeedForward)
    experts = layer.feed_forward.experts
    assert experts.gate_up.data_ptr() == stored["layers.1.moe.gate_up"]
    assert experts.down.data_ptr() == stored["layers.1.moe.down"]
    for site in (packed.context.projection, *packed.heads, layer.query, layer.qkv, layer.feed_forward.router):
        assert site.weight.data_ptr() == stored[site.name]


def test_mods_by_name() -> None:
    assert parse_mods("exact") == EXACT_MODS and parse_mods("none") == () and parse_mods("ALL") == MOD_NAMES
    assert parse_mods("smooth, fold_norm_gains") == ("fold_norm_gains", "smooth")
    for text in ("", "smooth,smooth", "exact,smooth", "polish"):
        with pytest.raises(ValueError):
            parse_mods(text)
    assert {name for name, mod in MODS.items() if mod.exact} == set(EXACT_MODS)
    assert set(EXACT_MODS).isdisjoint(OFFERED_MODS) and set(MODS) == {*EXACT_MODS, *OFFERED_MODS}
