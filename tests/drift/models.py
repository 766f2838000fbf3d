"""A small quantized model whose catalog has a second domain, with larger embeddings, that calibration never saw."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from loka_serve.catalog.catalog import Catalog
from loka_serve.drift.guard import DriftGuard, read_baselines
from loka_serve.drift.options import DriftOptions
from loka_serve.engines.base import EngineLimits, EngineRequest, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.collect import collect
from loka_serve.quantization.apply import apply_plan
from loka_serve.quantization.plan import PrecisionPlan

CONFIG = dataclasses.replace(PRESETS["tiny"], codebook_sizes=(12, 9, 15), max_context=20)
HOME, ABROAD = range(0, 6), range(6, 12)
"""First codes of the items that calibration saw, and of the others."""
BEAM = 4
DRIFTED = "context.projection"
"""The site that reads the embeddings of the history; what comes after it is normalised."""


def requests(first_codes: range, count: int, seed: int) -> tuple[EngineRequest, ...]:
    """Histories of 1 to 8 items with these first codes."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(generator.integers(1, 9))
        levels = [generator.integers(first_codes.start, first_codes.stop, length)]
        levels += [generator.integers(0, size, length) for size in CONFIG.codebook_sizes[1:]]
        found.append(EngineRequest(np.stack(levels, 1).astype(np.int32), np.zeros(0, np.int32), BEAM))
    return tuple(found)


def make_engine(recipe: str = "fp8_row") -> tuple[ReferenceEngine, dict[str, Any]]:
    """An engine whose sites run `recipe` (routers and heads BF16), and the ``probe.json`` of its calibration."""
    generator = np.random.default_rng(0)
    codes = np.stack([generator.integers(0, size, 200) for size in CONFIG.codebook_sizes], 1)
    catalog = Catalog.build([f"i{index}" for index in range(200)], codes, codebook_sizes=CONFIG.codebook_sizes)
    model = OneRecV2(CONFIG).initialize(0)
    with torch.no_grad():
        model.context.item_embeddings[0].weight[ABROAD.start :] *= 16
    engine = ReferenceEngine(model, catalog, EngineLimits(50, BEAM, 20, 3), "cpu")
    observed = collect(engine, model, requests(HOME, 400, seed=1), covariance=False)
    summaries = {name: dataclasses.asdict(site.total().summary()) for name, site in observed.items()}
    for summary in summaries.values():  # as JSON has it
        summary["octaves"] = {str(octave): count for octave, count in summary["octaves"].items()}
    kept = {name for name in summaries if name.startswith("heads") or name.endswith("router")}
    plan = PrecisionPlan({name: "bf16" if name in kept else recipe for name in summaries})
    apply_plan(model, plan, {name: summary["absmax"] for name, summary in summaries.items()})
    return engine, {"sites": [{"name": name, "inputs": summary} for name, summary in summaries.items()]}


class Watched:
    """An engine under a guard that looks at every batch."""

    def __init__(self, recipe: str = "fp8_row", **options: Any) -> None:
        self.engine, probe = make_engine(recipe)
        self.model = self.engine.model
        options = {"sample_every": 1, "window": 100} | options
        self.guard = DriftGuard(self.model, read_baselines(probe), DriftOptions(**options))

    def run(self, first_codes: range, count: int, seed: int) -> dict[str, float]:
        """Recommend in batches of 50; the largest stability index of each site on the way."""
        worst: dict[str, float] = {}
        for start in range(0, count, 50):
            batch = RequestBatch(requests(first_codes, 50, 1000 * seed + start))
            with self.guard.watching(batch):
                self.engine.recommend(batch)
            for drift in self.guard.judge() or []:
                worst[drift.site] = max(worst.get(drift.site, 0.0), drift.psi or 0.0)
        return worst

    def fallen(self) -> set[str]:
        """Sites in BF16 that the plan has otherwise."""
        return {name for name, site in self.guard._sites.items() if site.quantized is not None}
