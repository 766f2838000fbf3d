"""Norm gains and biases: what folding leaves of them, and that the answers stay."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loka_serve.models.layers import RMSNorm
from loka_serve.mods.fold_norm_gains import fold_norm_gains, gain_exponents
from loka_serve.mods.registry import apply_mods, revert
from loka_serve.mods.workspace import worst
from tests.mods.models import CONFIGS, TINY, answers, assert_same, make_model, parameters, workspace

BIASED = [name for name, config in CONFIGS.items() if config.linear_bias]
GAINED = [name for name, config in CONFIGS.items() if config.norm == "rms"]


@pytest.mark.parametrize("name", GAINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_fold_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = make_model(CONFIGS[name], dtype)
    expected, before = answers(model), parameters(model)
    rewrites = apply_mods(workspace(model), ["fold_norm_gains"])
    folded = {rewrite.target for rewrite in rewrites}
    # Spread over 6 octaves, so every one was measured, and only those stay folded that calibration finds no worse.
    assert len(folded) >= 5
    for target in folded:
        gain = model.get_submodule(target).weight.data.float().abs()
        if CONFIGS[name].position_encoding != "rotary" or not target.startswith("context."):
            assert float(gain.min()) > 0.7 and float(gain.max()) < 1.42  # 1 / sqrt(2) to sqrt(2), rounded
    for rewrite in rewrites:
        assert rewrite.before.keys() == rewrite.after.keys() and worst(rewrite.after) <= 1.1 * worst(rewrite.before)
        assert all(set(errors) == {"fp8_row", "fp8_block"} for errors in rewrite.after.values())
    assert_same(answers(model), expected)
    revert(rewrites)
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())


def test_a_gain_that_makes_up_for_small_weights_elsewhere_is_not_folded() -> None:
    """A gain of 2**-14 hides an outlier channel of the norm from FP8; folding it would bring the outlier back."""
    model = make_model(dataclasses.replace(TINY, layers=1, kv_layers=1, experts=0))
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.data.fill_(1.0)
    model.bos.data[3] = 2.0**17
    for table in model.token_embeddings:
        table.weight.data[:, 3] = 2.0**17
    model.layers[0].cross_attention_norm.weight.data[3] = 2.0**-14
    before = model.layers[0].cross_attention_norm.weight.data.clone()
    rewrites = fold_norm_gains(workspace(model))
    assert "layers.0.cross_attention_norm" not in {rewrite.target for rewrite in rewrites}
    assert torch.equal(model.layers[0].cross_attention_norm.weight.data, before)


def test_exponents_of_gains() -> None:
    gain = torch.tensor([1.0, -4.1, 0.0, 0.24, 1.45, 1e-3])
    assert gain_exponents(gain).tolist() == [0, 2, 0, -2, 1, -10]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, None)])
def test_whole_gains_change_the_answers_by_one_more_rounding(dtype: torch.dtype, tolerance: float | None) -> None:
    model = make_model(TINY, dtype).float()
    expected = answers(model)
    scale = torch.cat([logits.flatten() for logits in expected]).std()
    model = model.to(dtype)
    rewrites = apply_mods(workspace(model), ["fold_whole_norm_gains"])
    assert (model.norms[0].weight.data == 1).all() and (model.layers[1].ffn_norm.weight.data == 1).all()
    found = torch.cat([logits.flatten() for logits in answers(model.float())])
    error = float((found - torch.cat([logits.flatten() for logits in expected])).square().mean().sqrt() / scale)
    if tolerance is not None:
        assert error < tolerance  # sums of a 3-layer model in another order
    else:
        # Weights rounded once more, RMS 2**-9 / sqrt(3) each: 0.1 % a GEMM, over about ten of them in a row. Experts
        # that are selected by a hair may change, which costs more than all roundings.
        assert 1e-5 < error < 0.05
    revert(rewrites)
    gain = model.norms[0].weight.data
    assert float(gain.abs().max()) > 4


@pytest.mark.parametrize("name", BIASED)
def test_biases_of_keys_and_values_fold(name: str) -> None:
    model = make_model(CONFIGS[name])
    expected, before = answers(model), parameters(model)
    rewrites = apply_mods(workspace(model), ["fold_biases"])
    assert len(rewrites) == model.config.layers
    width = model.config.heads * model.config.head_dim
    bias = model.layers[0].self_attention.qkv.bias
    assert bias is not None and not bias.data[width:].any() and bias.data[:width].all()
    for found, wanted in zip(answers(model), expected, strict=True):
        # Two float32 evaluations of a 3-layer model in another order of summation; logits have a deviation near 3.
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=1e-4)
    revert(rewrites)
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())


def test_a_model_whose_biases_are_all_folded_has_none() -> None:
    model = make_model(CONFIGS["dense, hard swish, biases"])
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.zero_()
    width = model.config.heads * model.config.head_dim
    model.layers[1].self_attention.qkv.bias.data[width : 2 * width] = 0.7  # keys': softmax does not see it
    expected = answers(model)
    rewrites = apply_mods(workspace(model), ["fold_biases"])
    assert not model.config.linear_bias
    assert not any(name.endswith(".bias") for name, _ in model.named_parameters())
    for found, wanted in zip(answers(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=1e-4)
    revert(rewrites)
    assert model.config.linear_bias and model.layers[1].self_attention.qkv.bias.data[width] == 0.7
