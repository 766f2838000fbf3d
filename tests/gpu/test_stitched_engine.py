"""The tensorrt engine on a Hopper GPU: built, captured in graphs and compared with the reference, by runtime."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from loka_serve.build import main
from loka_serve.bundle import Bundle
from loka_serve.engines import load_engine
from loka_serve.engines.base import EngineLimits, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.engines.tensorrt.artifacts import Artifacts
from loka_serve.engines.tensorrt.engine import AsynchronousTensorRTEngine
from loka_serve.errors import EngineError
from tests.building import CONFIG, build_arguments
from tests.engines.tensorrt.bundles import random_batch

TOLERANCE = 0.4
LIMITS = EngineLimits(batch=4, beam=16, context=CONFIG.max_context, levels=3)


@pytest.fixture(scope="module", params=["torch", "tensorrt"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels between the segments need compute capability 9.0")
    if request.param == "tensorrt" and importlib.util.find_spec("tensorrt") is None:
        pytest.skip("TensorRT is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    arguments = build_arguments(folder, "--engine", "tensorrt", "--trt-runtime", request.param, "--quiet")
    arguments[arguments.index("--device") + 1] = "cuda"
    assert main([*arguments, "--recipe", "fp8_tensor"]) == 0
    return Bundle.load(folder / "bundle")


def test_serves_a_bundle_like_the_reference(bundle: Bundle) -> None:
    artifacts = Artifacts.load(bundle.path)
    assert artifacts.dtype == "bfloat16"
    names = {segment.name for segment in artifacts.stitching.segments}
    assert set(artifacts.plans) == (names if artifacts.runtime == "tensorrt" else set())
    engine = load_engine(bundle, "tensorrt", "cuda", LIMITS)
    assert isinstance(engine, AsynchronousTensorRTEngine)
    engine.warmup()
    assert set(engine.decoder.graphs) == set(engine.decoder.buckets.all())
    captured = dict(engine.decoder.graphs)
    oracle = ReferenceEngine(bundle.load_model("cuda"), bundle.catalog, LIMITS, "cuda")
    for count in (1, 3, 4):
        batch = random_batch(bundle, count, seed=count)
        found, expected = engine.recommend(batch), oracle.recommend(batch)
        assert found.counts.tolist() == expected.counts.tolist() and not found.failed.any()
        for row, live in enumerate(found.counts.tolist()):
            wanted = dict(zip(expected.leaves[row].tolist(), expected.scores[row].tolist(), strict=True))
            pairs = zip(found.leaves[row, :live].tolist(), found.scores[row, :live].tolist(), strict=True)
            common = [(score, wanted[leaf]) for leaf, score in pairs if leaf in wanted]
            # Activations are BF16 here and float32 there; E4M3 codes of slightly different inputs.
            assert all(abs(score - reference) < TOLERANCE for score, reference in common)
            missing = [score for leaf, score in wanted.items() if leaf >= 0 and leaf not in found.leaves[row]]
            assert all(score < found.scores[row, live - 1] + TOLERANCE for score in missing)  # near the cut
            assert len(missing) <= max(1, live // 4)
    assert engine.decoder.graphs == captured


def test_two_batches_in_flight_give_what_one_alone_gives(bundle: Bundle) -> None:
    engine = load_engine(bundle, "tensorrt", "cuda", LIMITS)
    assert isinstance(engine, AsynchronousTensorRTEngine)
    engine.warmup()
    batches = [random_batch(bundle, 4, seed) for seed in (5, 6)]
    alone = [engine.recommend(batch) for batch in batches]
    tickets = [engine.submit(batch) for batch in batches]
    for ticket, expected in zip(tickets, alone, strict=True):
        result = engine.collect(ticket)
        assert (result.leaves == expected.leaves).all() and (result.scores == expected.scores).all()


def test_limits_beyond_the_plans_are_refused(bundle: Bundle) -> None:
    if Artifacts.load(bundle.path).runtime == "torch":
        pytest.skip("torch has no plans")
    held = Artifacts.load(bundle.path).limits
    beyond = EngineLimits(held.batch + 1, 16, CONFIG.max_context, 3)
    with pytest.raises(EngineError, match="the bundle's plans were built for at most"):
        load_engine(bundle, "tensorrt", "cuda", beyond)


def test_a_batch_beyond_the_limits_is_refused(bundle: Bundle) -> None:
    engine = load_engine(bundle, "tensorrt", "cuda", LIMITS)
    with pytest.raises(EngineError, match="batch of 5 requests: expected 1 to 4"):
        engine.recommend(RequestBatch(random_batch(bundle, 5, seed=0).requests))
