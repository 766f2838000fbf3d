"""Smoothing: outlier channels that break FP8 are balanced, bit for bit the same function."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.mods.registry import apply_mods, revert
from loka_serve.mods.smooth import smoothing_exponents
from tests.mods.models import TINY, answers, assert_same, calibrated, make_model, parameters, workspace


def plain_model(**change: object) -> OneRecV2:
    model = make_model(dataclasses.replace(TINY, **change))
    for name, parameter in model.named_parameters():
        if name.startswith(("norms", "layers", "context.norms")) and parameter.ndim == 1 and "moe" not in name:
            parameter.data.fill_(1.0)
    return model


def test_outliers_of_a_norm_become_safe() -> None:
    """A gain of 2**18 with columns of 2**-18: FP8 has no digits left for the other channels."""
    model = plain_model()
    ffn = model.layers[1]
    ffn.ffn_norm.weight.data[7] = 2.0**18
    for weight in (ffn.moe.router.weight, ffn.moe.gate_up.weight, ffn.moe.shared.gate_up.weight):
        weight.data[..., 7] *= 2.0**-18
    expected, before = answers(model), parameters(model)
    rewrites = apply_mods(workspace(model), ["smooth"])
    assert [rewrite.target for rewrite in rewrites] == ["layers.1.ffn_norm"]
    (rewrite,) = rewrites
    for site in ("layers.1.moe.router", "layers.1.moe.gate_up", "layers.1.moe.shared.gate_up"):
        # Both recipes lose the other 63 channels of a row or a block of 128, which is all of it here.
        assert min(rewrite.before[site].values()) > 0.3 and max(rewrite.after[site].values()) < 0.12
    assert_same(answers(model), expected)
    revert(rewrites)
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())


@pytest.mark.parametrize(
    ("where", "target"),
    [
        ("values", "layers.0.self_attention.qkv"),
        ("context values", "context.norms.1"),
        ("up", "layers.0.mlp.gate_up"),
        ("embeddings", "context.embeddings"),
    ],
)
def test_outliers_of_other_producers_become_safe(where: str, target: str) -> None:
    model = plain_model(kv_layers=1)
    layer = model.layers[0]
    producers, readers = {
        "values": ([layer.self_attention.qkv.weight.data[130]], [layer.self_attention.output.weight.data[:, 2]]),
        "context values": (
            [model.context.norms[1].weight.data[2]],
            [block.cross_attention.output.weight.data[:, head * 16 + 2] for block in model.layers for head in (0, 1)],
        ),
        "up": ([layer.mlp.gate_up.weight.data[128 + 5]], [layer.mlp.down.weight.data[:, 5]]),
        "embeddings": (
            [
                parameter.data[..., 9]
                for name, parameter in model.context.named_parameters()
                if name == "static" or "embedding" in name
            ],
            [model.context.projection.weight.data[:, 9]],
        ),
    }[where]
    for view in producers:
        view *= 2.0**18
    for view in readers:
        view *= 2.0**-18
    expected = answers(model)
    rewrites = apply_mods(workspace(model), ["smooth"])
    # Rows of 2**18 in a weight may be balanced on its other side first; the outlier's own group follows.
    rewrite = rewrites[-1]
    assert rewrite.target == target
    for site, errors in rewrite.before.items():
        assert max(errors.values()) > 2 * max(rewrite.after[site].values())
    assert_same(answers(model), expected)


def test_an_expert_with_huge_hidden_units_is_scaled_on_its_own() -> None:
    """Under one static scale for all inputs, the other experts' inputs vanish beside it."""
    model = plain_model()
    moe = model.layers[1].moe
    selected = calibrated(model)["layers.1.moe.down"].sample()[1].diff()
    expert = int(selected.argmax())
    moe.gate_up.weight.data[expert, 64:] *= 2.0**20
    moe.down.weight.data[expert] *= 2.0**-20
    expected = answers(model)
    rewrites = apply_mods(workspace(model, ("fp8_tensor",)), ["smooth"])
    rewrite = next(rewrite for rewrite in rewrites if rewrite.target == "layers.1.moe.gate_up")
    assert rewrite.before["layers.1.moe.down"]["fp8_tensor"] > 0.9
    assert rewrite.after["layers.1.moe.down"]["fp8_tensor"] < 0.2
    assert_same(answers(model), expected)


def test_a_balanced_model_and_a_build_without_fp8_are_left_alone() -> None:
    model = plain_model()
    assert apply_mods(workspace(model), ["smooth"]) == []
    model.norms[0].weight.data[7] = 2.0**18
    work = workspace(model, ())
    assert apply_mods(work, ["smooth"]) == [] and not work.changes_inputs


def test_exponents_are_centred_square_roots() -> None:
    inputs = torch.tensor([1.0, 1.0, 1.0, 256.0, 0.0, 3.0])
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert smoothing_exponents(inputs, weights).tolist() == [0, 0, 0, 4, 0, 0]
    assert smoothing_exponents(inputs * 64, weights).tolist() == [0, 0, 0, 4, 0, 0]
    assert smoothing_exponents(torch.zeros(3), torch.ones(3)).tolist() == [0, 0, 0]
