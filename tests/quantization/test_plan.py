"""Precision plans: what they accept, and their JSON form."""

from __future__ import annotations

import json

import pytest

from loka_serve.errors import QuantizationError
from loka_serve.quantization.plan import PrecisionPlan


def test_round_trips_in_order() -> None:
    plan = PrecisionPlan({"heads.0": "bf16", "layers.0.mlp.down": "fp8_row"})
    again = PrecisionPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and list(again.recipes) == ["heads.0", "layers.0.mlp.down"]
    assert again.quantized_sites == ["layers.0.mlp.down"] and again["heads.0"] == "bf16"


def test_uniform() -> None:
    assert PrecisionPlan.uniform(["a", "b"], "fp8_block").recipes == {"a": "fp8_block", "b": "fp8_block"}


def test_unknown_recipe_names_the_site() -> None:
    with pytest.raises(QuantizationError, match="plan, site heads.0: unknown recipe 'fp4'"):
        PrecisionPlan({"heads.0": "fp4"})


def test_sites_must_be_those_of_the_model() -> None:
    plan = PrecisionPlan.uniform(["a", "b"], "bf16")
    plan.check_sites(["b", "a"])
    with pytest.raises(QuantizationError, match="no recipe for site c"):
        plan.check_sites(["a", "b", "c"])
    with pytest.raises(QuantizationError, match="unknown site b"):
        plan.check_sites(["a"])


@pytest.mark.parametrize("values", [{}, {"recipes": ["bf16"]}, {"recipes": {"a": 1}}])
def test_other_forms_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(QuantizationError, match='expected an object "recipes"'):
        PrecisionPlan.from_dict(values)
