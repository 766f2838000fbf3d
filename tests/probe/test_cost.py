"""What one site costs the model: nothing where nothing changes, much where much does, and the model stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loka_serve.engines.base import RequestBatch
from loka_serve.models.layers import Linear
from loka_serve.probe.cost import ModelCost, model_costs
from tests.probe.test_collect import make_engine, make_requests

AMAX = 10.0


def costs_of(recipes: dict[str, str], amax: float = AMAX, harm: float = 1.0) -> dict[str, ModelCost]:
    engine, requests = make_engine(), [*make_requests(5), *make_requests(5, length=0)]
    if harm != 1.0:
        site = engine.model.sites()["layers.0.mlp.down"]
        assert site.weight is not None
        site.weight.data[:, 0] *= harm
    candidates = []
    for request in requests:
        result = engine.recommend(RequestBatch((request,)))
        leaves = result.leaves[0][: result.counts[0]]
        candidates.append(engine.catalog.trie.semantic_ids()[leaves].astype(np.int32))
    before = {name: site.method for name, site in engine.model.sites().items()}
    found = model_costs(engine.model, requests, candidates, recipes, dict.fromkeys(recipes, amax))
    assert {name: site.method for name, site in engine.model.sites().items()} == before
    return found


def test_a_recipe_that_changes_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # With the reference in its place a site computes what it did.
    monkeypatch.setattr("loka_serve.quantization.recipes.Fp8RowRecipe.round_inputs", lambda self, inputs, state: inputs)
    monkeypatch.setattr(
        "loka_serve.quantization.recipes.Fp8RowRecipe._quantize_matrix",
        lambda self, weight, amax: {"weight": weight.clone(), "weight_scale": torch.ones(weight.shape[0])},
    )
    cost = costs_of({"layers.0.mlp.down": "fp8_row"})["layers.0.mlp.down"]
    assert cost.top_k_overlap == 1.0 and abs(cost.kl_divergence) < 1e-9 and cost.histories == 10


def test_figures_of_a_site() -> None:
    found = costs_of({"layers.0.mlp.down": "fp8_row", "context.projection": "fp8_row", "heads.2": "fp8_row"})
    assert list(found) == ["layers.0.mlp.down", "context.projection", "heads.2"]
    for cost in found.values():
        assert len(cost.kl_by_level) == 3 and cost.kl_divergence == pytest.approx(sum(cost.kl_by_level) / 3)
        assert 0 < cost.kl_divergence < 0.05 and 0.5 < cost.top_k_overlap <= 1 and cost.top_k == 4
    # The last head's logits are the last level's alone; the context reaches all levels.
    assert found["heads.2"].kl_by_level[:2] == (0.0, 0.0) < found["heads.2"].kl_by_level[1:][1:]
    assert all(level > 0 for level in found["context.projection"].kl_by_level)


def test_bf16_costs_less_than_fp8_and_a_useless_scale_most() -> None:
    site = "layers.0.mlp.down"
    exact, fp8 = (costs_of({site: recipe})[site].kl_divergence for recipe in ("bf16", "fp8_row"))
    saturated = costs_of({site: "fp8_tensor"}, amax=1e-3)[site]
    assert 0 <= exact < fp8 < saturated.kl_divergence
    assert saturated.top_k_overlap < 1


def test_no_histories() -> None:
    engine = make_engine()
    assert model_costs(engine.model, [], [], {"heads.0": "fp8_row"}, {"heads.0": 1.0}) == {}
    assert isinstance(engine.model.sites()["heads.0"], Linear)
