"""Collecting site inputs from a real run: all rows seen, statistics right, nothing left behind."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import EngineLimits, EngineRequest
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.errors import QuantizationError
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.collect import SAMPLE_ROWS, SAMPLE_ROWS_PER_GROUP, collect
from loka_serve.probe.sites import site_kind

CONFIG = dataclasses.replace(PRESETS["tiny"], codebook_sizes=(12, 9, 15), max_context=20)
BEAM = 8


def make_engine() -> ReferenceEngine:
    generator = np.random.default_rng(0)
    semantic_ids = np.stack([generator.integers(0, size, 300) for size in CONFIG.codebook_sizes], 1)
    catalog = Catalog.build([f"i{index}" for index in range(300)], semantic_ids, codebook_sizes=CONFIG.codebook_sizes)
    model = OneRecV2(CONFIG).initialize(0)
    return ReferenceEngine(model, catalog, EngineLimits(4, BEAM, 20, 3), "cpu")


def make_requests(count: int, length: int = 6) -> list[EngineRequest]:
    generator = np.random.default_rng(1)
    return [
        EngineRequest(generator.integers(0, 9, (length, 3)).astype(np.int32), np.zeros(0, np.int32), BEAM)
        for _ in range(count)
    ]


def test_every_site_sees_every_row_of_the_search() -> None:
    engine = make_engine()
    done = []
    inputs = collect(engine, engine.model, make_requests(10), done.append)
    assert done == [4, 4, 2]
    assert list(inputs) == list(engine.model.sites())
    # The first level has one beam a request, the two others BEAM.
    decoder_rows = 10 * (1 + 2 * BEAM)
    rows = {name: site.total().summary().rows for name, site in inputs.items()}
    assert rows["context.projection"] == 10 * (1 + 6)  # the static slot and six items
    assert rows["layers.0.mlp.down"] == rows["layers.1.moe.router"] == decoder_rows
    assert rows["layers.1.moe.gate_up"] == rows["layers.2.moe.down"] == CONFIG.experts_per_token * decoder_rows
    assert [rows[f"heads.{level}"] for level in range(3)] == [10, 10 * BEAM, 10 * BEAM]
    assert all(site.observer is None for site in engine.model.sites().values())


def test_statistics_are_those_of_the_true_inputs() -> None:
    engine = make_engine()
    recorded: list[torch.Tensor] = []
    site = engine.model.sites()["layers.1.moe.shared.down"]
    forward = site.forward
    site.forward = lambda x: (recorded.append(x.clone()), forward(x))[1]  # type: ignore[method-assign]
    inputs = collect(engine, engine.model, make_requests(6))["layers.1.moe.shared.down"]
    everything = torch.cat(recorded)
    summary = inputs.total().summary()
    assert summary.absmax == everything.abs().max().item()
    assert summary.variance == pytest.approx(everything.double().var(correction=0).item(), rel=1e-6)
    rows, offsets = inputs.sample()
    assert offsets is None and rows.shape == (min(SAMPLE_ROWS, len(everything)), everything.shape[1])
    assert all((everything == row).all(1).any() for row in rows)


def test_experts_are_seen_apart() -> None:
    engine = make_engine()
    inputs = collect(engine, engine.model, make_requests(10))["layers.1.moe.gate_up"]
    assert inputs.group_statistics is not None
    by_expert = [group.rows for group in inputs.group_statistics.groups]
    rows, offsets = inputs.sample()
    assert offsets is not None
    assert offsets.diff().tolist() == [min(count, SAMPLE_ROWS_PER_GROUP) for count in by_expert]
    assert len(rows) == offsets[-1]


def test_an_overflowing_site_is_named() -> None:
    engine = make_engine()
    weight = engine.model.sites()["layers.0.mlp.down"].weight
    assert weight is not None
    weight.data[0, 0] = math.inf
    with pytest.raises(QuantizationError, match="site layers.1.cross_attention.query: .* NaN or infinite"):
        collect(engine, engine.model, make_requests(2))
    assert all(site.observer is None for site in engine.model.sites().values())


def test_kinds() -> None:
    kinds = {name: site_kind(name, site) for name, site in OneRecV2(CONFIG).sites().items()}
    assert kinds["layers.1.moe.gate_up"] == kinds["layers.1.moe.down"] == "grouped"
    assert kinds["layers.1.moe.router"] == "router" and kinds["heads.2"] == "head"
    assert kinds["layers.1.moe.shared.gate_up"] == kinds["context.projection"] == kinds["layers.0.mlp.down"] == "linear"
