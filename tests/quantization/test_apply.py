"""Putting a plan into force on a whole model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from loka_serve.errors import QuantizationError
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.apply import apply_plan, weight_shape
from loka_serve.quantization.plan import PrecisionPlan

CONFIG = dataclasses.replace(PRESETS["tiny"], codebook_sizes=(20, 20, 20))


def model() -> OneRecV2:
    return OneRecV2(CONFIG).initialize(0).eval()


@torch.inference_mode()
def logits(model: OneRecV2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(0, 20, (2, 9, 3), generator=generator)
    lengths = torch.tensor([9, 4])
    context = model.prepare_context(history, lengths, torch.zeros(2, 0, dtype=torch.long))
    targets = torch.randint(0, 20, (2, 5, 3), generator=generator)
    return torch.stack(model.teacher_forced(context, targets, lengths[:, None].expand(-1, 5)))


def relative(output: Tensor, reference: Tensor) -> float:
    return ((output - reference).norm() / reference.norm()).item()


def test_the_whole_model_runs_by_its_recipes() -> None:
    reference = logits(model())
    errors = {}
    for recipe in ("bf16", "fp8_row", "fp8_block"):
        quantized = model()
        apply_plan(quantized, PrecisionPlan.uniform(quantized.sites(), recipe))
        assert all(site.weight is None and site.method is not None for site in quantized.sites().values())
        errors[recipe] = relative(logits(quantized), reference)
    # Some twenty GEMMs in sequence of .002 (bf16) and .037 (FP8) relative error each, added through residuals.
    assert 0 < errors["bf16"] < 0.03
    assert errors["bf16"] < errors["fp8_row"] < 0.4 and errors["bf16"] < errors["fp8_block"] < 0.4


def test_only_the_named_sites_change() -> None:
    quantized, reference = model(), model()
    plan = PrecisionPlan.uniform(quantized.sites(), "bf16").recipes | {"layers.0.mlp.down": "fp8_row"}
    apply_plan(quantized, PrecisionPlan(plan))
    apply_plan(reference, PrecisionPlan.uniform(reference.sites(), "bf16"))
    for name, site in quantized.sites().items():
        inputs = torch.randn(4, site.in_features, generator=torch.Generator().manual_seed(2))
        if "moe.gate_up" in name or "moe.down" in name:
            continue
        same = torch.equal(site(inputs), reference.sites()[name](inputs))
        assert same == (name != "layers.0.mlp.down")


def test_static_scales_come_from_calibration() -> None:
    quantized = model()
    plan = PrecisionPlan.uniform(quantized.sites(), "fp8_tensor")
    with pytest.raises(QuantizationError, match="site context.projection: fp8_tensor needs"):
        apply_plan(quantized, plan)
    quantized = model()
    apply_plan(quantized, plan, dict.fromkeys(quantized.sites(), 8.0))
    assert relative(logits(quantized), logits(model())) < 0.4


def test_a_plan_of_another_model_and_a_second_plan_are_refused() -> None:
    quantized = model()
    with pytest.raises(QuantizationError, match="no recipe for site context.projection"):
        apply_plan(quantized, PrecisionPlan({}))
    plan = PrecisionPlan.uniform(quantized.sites(), "bf16")
    apply_plan(quantized, plan)
    with pytest.raises(QuantizationError, match="site context.projection: already quantized"):
        apply_plan(quantized, plan)


def test_weight_shapes() -> None:
    for site in model().sites().values():
        assert site.weight is not None and weight_shape(site) == tuple(site.weight.shape)
