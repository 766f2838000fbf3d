"""Random bundles are bundles: they load, verify and answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from benchmarks.random_bundle import random_catalog, write_random_bundle
from loka_serve.bundle import Bundle
from loka_serve.engines.base import EngineRequest, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.models.config import PRESETS


def test_a_random_bundle_is_verified_and_answers(tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS["tiny"], layers=2)
    catalog = random_catalog(300, config.codebook_sizes)
    assert 250 < catalog.item_count <= 300 and catalog.index_of("item-7") == 7  # sorted by semantic ID, as named
    write_random_bundle(tmp_path / "bundle", config, "fp8", catalog, torch.device("cpu"), batch=2)
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.engine == "hopper" and bundle.limits.batch == 2 and bundle.catalog.version == catalog.version
    assert {"fp8_row", "fp8_block", "bf16"} == set(bundle.plan.recipes.values())
    engine = ReferenceEngine(bundle.load_model(), bundle.catalog, bundle.limits, "cpu")
    history = np.zeros((3, config.levels), np.int32)
    found = engine.recommend(RequestBatch((EngineRequest(history, np.zeros(len(config.features), np.int32), 4),)))
    assert found.counts.tolist() == [4] and np.isfinite(found.scores[0, :4]).all()
