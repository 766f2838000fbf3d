"""The hopper engine from a bundle: warm-up, ragged batches, refusal of what does not fit, and graphs that stay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loka_serve.build import main
from loka_serve.bundle import Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.engines import load_engine
from loka_serve.engines.base import EngineLimits, EngineRequest, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.errors import EngineError
from tests.building import CONFIG, build_arguments

LIMITS = EngineLimits(batch=4, beam=16, context=CONFIG.max_context, levels=3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper engine needs compute capability 9.0")
    folder = tmp_path_factory.mktemp("bundle")
    assert main(build_arguments(folder, "--engine", "hopper", "--min-top-k-overlap", "0")) == 0
    return Bundle.load(folder / "bundle")


def requests(catalog: Catalog, count: int, seed: int = 0) -> tuple[EngineRequest, ...]:
    generator = np.random.default_rng(seed)
    return tuple(
        EngineRequest(
            generator.integers(0, CONFIG.codebook_sizes, (int(generator.integers(0, 21)), 3)).astype(np.int32),
            generator.integers(0, 3, 1).astype(np.int32),
            int(generator.integers(1, 17)),
            catalog.filter(generator.permutation(catalog.item_count)[: 10 * row].tolist(), {}),
        )
        for row in range(count)
    )


def test_serves_a_bundle_like_the_reference(bundle: Bundle) -> None:
    from loka_serve.engines.hopper.engine import HopperEngine

    engine = load_engine(bundle, "hopper", "cuda", LIMITS)
    assert isinstance(engine, HopperEngine)
    engine.warmup()
    assert set(engine.decoder.graphs) == set(engine.decoder.buckets.all())
    captured = dict(engine.decoder.graphs)
    oracle = ReferenceEngine(bundle.load_model("cuda"), bundle.catalog, LIMITS, "cuda")
    for count in (1, 2, 3, 4):
        batch = RequestBatch(requests(bundle.catalog, count, seed=count))
        found, expected = engine.recommend(batch), oracle.recommend(batch)
        np.testing.assert_array_equal(found.counts, expected.counts)
        for row, request in enumerate(batch.requests):
            leaves = found.leaves[row, : found.counts[row]].tolist()
            others = dict(zip(expected.leaves[row].tolist(), expected.scores[row].tolist(), strict=True))
            common = [(leaf, score) for leaf, score in zip(leaves, found.scores[row], strict=False) if leaf in others]
            assert len(set(leaves)) == len(leaves) and len(common) >= len(leaves) - max(1, len(leaves) // 3)
            # FP8 codes of inputs that differ in their last bit: 0.08 RMS over three levels of random weights.
            assert all(abs(score - others[leaf]) < 0.5 for leaf, score in common)
            if request.filter is not None:
                assert request.filter.allowed_nodes[-1][leaves].all()
    assert engine.decoder.graphs == captured


def test_repeats_bitwise(bundle: Bundle) -> None:
    engine = load_engine(bundle, "hopper", "cuda", LIMITS)
    engine.warmup()
    batch = RequestBatch(requests(bundle.catalog, 4, seed=9))
    first = engine.recommend(batch)
    for _ in range(5):
        again = engine.recommend(batch)
        np.testing.assert_array_equal(again.leaves, first.leaves)
        np.testing.assert_array_equal(again.scores, first.scores)


def test_a_swap_changes_the_answers_and_keeps_the_graphs(bundle: Bundle) -> None:
    from loka_serve.engines.hopper.engine import HopperEngine

    engine = load_engine(bundle, "hopper", "cuda", LIMITS)
    assert isinstance(engine, HopperEngine)
    engine.warmup()
    graphs = dict(engine.decoder.graphs)
    ids = bundle.catalog.trie.semantic_ids()[::2]
    half = Catalog.build([f"kept{row}" for row in range(len(ids))], ids, codebook_sizes=CONFIG.codebook_sizes)
    engine.swap_catalog(half)
    assert engine.decoder.graphs == graphs
    oracle = ReferenceEngine(bundle.load_model("cuda"), half, LIMITS, "cuda")
    batch = RequestBatch(requests(half, 2, seed=3))
    np.testing.assert_array_equal(engine.recommend(batch).counts, oracle.recommend(batch).counts)


def test_limits_beyond_the_memory_are_refused_before_anything_runs(bundle: Bundle) -> None:
    huge = dataclasses.replace(LIMITS, batch=1 << 20, beam=1024)
    with pytest.raises(EngineError, match=r"limits batch 1048576, beam 1024.* lower a limit"):
        load_engine(bundle, "hopper", "cuda", huge)
