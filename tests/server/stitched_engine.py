"""The scripted engine with the stitched executor behind it: the same faults on demand, every ranking computed.

The model is made so that leaves rank in their order, as the scripted engine ranks them: its blocks add nothing to the
hidden state, and a level's logits fall with the code, steeper at earlier levels. All segments and operations run.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loka_serve.bundle import (
    CATALOG_FILE,
    CONFIG_FILE,
    GATE_FILE,
    PLAN_FILE,
    PROBE_FILE,
    Bundle,
    write_json,
    write_manifest,
)
from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import EngineLimits, RequestBatch
from loka_serve.engines.hopper.buckets import Buckets
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.tensorrt.artifacts import build_artifacts
from loka_serve.engines.tensorrt.engine import TensorRTEngine
from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.runtimes.onnxruntime import OnnxRuntime
from loka_serve.models.onerec_v2 import OneRecV2
from tests.engines.tensorrt.weights import mixed_plan, random_model, write_weights
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_server import CODEBOOK_SIZES, make_model

SLOPES = (4.0, 0.25, 1 / 64)
"""By level, of the logits: one code more at a level outweighs all that later levels can add."""


def stitched_score(semantic_id: Sequence[int]) -> float:
    """The log-probability of a semantic ID."""
    return sum(
        -slope * code - math.log(sum(math.exp(-slope * other) for other in range(size)))
        for slope, code, size in zip(SLOPES, semantic_id, CODEBOOK_SIZES, strict=True)
    )


class StitchedEngine(ScriptedEngine):
    """Does what the newest history item says, and ranks by the stitched executor on the CPU.

    Args:
        directory: where its bundle is, or is to be written.
    """

    def __init__(self, catalog: Catalog, limits: EngineLimits, seconds: float, directory: Path) -> None:
        super().__init__(catalog, limits, seconds)
        torch.set_num_threads(1)
        path = directory / f"stitched-{catalog.version}"
        if not path.exists():
            unfinished = directory / f"unfinished-{os.getpid()}"
            write_bundle(unfinished, catalog, limits)
            try:
                unfinished.rename(path)
            except OSError:  # another engine was faster
                shutil.rmtree(unfinished)
        self.engine = TensorRTEngine(Bundle.load(path), limits, "cpu")

    def warmup(self) -> None:
        super().warmup()
        self.engine.warmup()

    def swap_catalog(self, catalog: Catalog) -> None:
        super().swap_catalog(catalog)
        self.engine.swap_catalog(catalog)

    def rank(self, batch: RequestBatch) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        result = self.engine.recommend(batch)
        assert not result.failed.any()
        return result.leaves, result.scores


def write_bundle(directory: Path, catalog: Catalog, limits: EngineLimits) -> None:
    """What a build for ONNX Runtime would write."""
    directory.mkdir()
    model = ordered_model()
    plan = mixed_plan(model)
    stitching = export(model.config, plan, write_weights(directory, model, plan), OnnxRuntime.dtype)
    build_artifacts(directory, stitching, OnnxRuntime(), Buckets.of(limits, HopperOptions()))
    write_json(directory / CONFIG_FILE, model.config.to_dict())
    write_json(directory / PLAN_FILE, plan.to_dict())
    write_json(directory / PROBE_FILE, {"sites": []})
    write_json(directory / GATE_FILE, {"passed": None})
    catalog.save(directory / CATALOG_FILE)
    write_manifest(directory, "scripted", "tensorrt", limits, {})


def ordered_model() -> OneRecV2:
    """The scripted server's shape with the weights that the module's first lines tell of."""
    model = random_model(make_model().config)
    with torch.no_grad():
        model.bos.fill_(1.0)
        for table in model.token_embeddings:
            table.weight.fill_(1.0)
        for name, site in model.sites().items():
            if name.endswith((".output", ".down")):
                assert site.weight is not None
                site.weight.zero_()
        for head, slope in zip(model.heads, SLOPES, strict=True):
            codes = torch.arange(head.out_features, dtype=torch.float32)
            head.weight.copy_(-slope * codes[:, None].expand(-1, head.in_features) / head.in_features)
    return model
