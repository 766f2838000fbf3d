"""The reference engine end to end: teacher-forced brute force, ragged batches, filters, limits and swaps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import BeamResult, EngineLimits, EngineRequest, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.errors import EngineError
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2

# Teacher forcing and cached steps sum in another order; 3 levels of float32 log-probabilities around -6 each.
TOLERANCE = 1e-4
CONFIG = dataclasses.replace(PRESETS["tiny"], codebook_sizes=(12, 9, 15), position_encoding="rotary")
LIMITS = EngineLimits(batch=6, beam=40, context=20, levels=3)


def make_catalog(seed: int, items: int = 60, sizes: tuple[int, ...] = CONFIG.codebook_sizes) -> Catalog:
    generator = np.random.default_rng(seed)
    semantic_ids = np.stack([generator.integers(0, size, items) for size in sizes], 1)
    return Catalog.build([f"item{index}" for index in range(items)], semantic_ids, codebook_sizes=sizes)


@pytest.fixture(scope="module")
def engine() -> ReferenceEngine:
    return ReferenceEngine(OneRecV2(CONFIG).initialize(3), make_catalog(0), LIMITS, "cpu")


def request(engine: ReferenceEngine, length: int, beam_width: int, seed: int, excluded: int = 0) -> EngineRequest:
    generator = np.random.default_rng(seed)
    history = np.stack([generator.integers(0, size, length) for size in CONFIG.codebook_sizes], 1).astype(np.int32)
    request_filter = engine.catalog.filter(generator.permutation(60)[:excluded].tolist(), {}) if excluded else None
    return EngineRequest(history, np.zeros(0, np.int32), beam_width, request_filter)


def rows(result: BeamResult, row: int) -> tuple[list[int], np.ndarray]:
    count = int(result.counts[row])
    assert (result.leaves[row, count:] == -1).all() and (result.leaves[row, :count] >= 0).all()
    return result.leaves[row, :count].tolist(), result.scores[row, :count]


@torch.inference_mode()
def leaf_scores(engine: ReferenceEngine, request: EngineRequest) -> np.ndarray:
    """Teacher-forced log-probability of every leaf."""
    history = torch.from_numpy(request.history.astype(np.int64))[None]
    lengths = torch.tensor([len(request.history)])
    context = engine.model.prepare_context(history, lengths, torch.zeros(1, 0, dtype=torch.long))
    targets = torch.from_numpy(engine.catalog.trie.semantic_ids().astype(np.int64))[None]
    logits = engine.model.teacher_forced(context, targets, lengths[:, None].expand(-1, targets.shape[1]))
    return sum(
        level_logits.log_softmax(-1)[0].gather(1, targets[0, :, level, None])[:, 0]
        for level, level_logits in enumerate(logits)
    ).numpy()


def test_wide_beams_rank_every_leaf_as_teacher_forcing_does(engine: ReferenceEngine) -> None:
    wide = dataclasses.replace(LIMITS, beam=100)
    engine = ReferenceEngine(engine.model, engine.catalog, wide, "cpu")
    requests = (request(engine, 9, 100, 1), request(engine, 0, 100, 2), request(engine, 20, 100, 3, excluded=50))
    result = engine.recommend(RequestBatch(requests))
    for row, one in enumerate(requests):
        expected = leaf_scores(engine, one)
        legal = np.arange(len(expected)) if one.filter is None else np.flatnonzero(one.filter.allowed_nodes[-1])
        leaves, scores = rows(result, row)
        assert sorted(leaves) == legal.tolist()
        np.testing.assert_allclose(scores, expected[leaves], atol=TOLERANCE)
        assert (np.diff(scores) <= 0).all()


def test_a_request_gets_the_same_answer_alone_and_in_any_batch(engine: ReferenceEngine) -> None:
    shapes = ((0, 3), (20, 40), (7, 1), (12, 16), (1, 8), (19, 25))
    requests = tuple(request(engine, *shape, seed, excluded=seed * 8) for seed, shape in enumerate(shapes))
    together = engine.recommend(RequestBatch(requests))
    backwards = engine.recommend(RequestBatch(requests[::-1]))
    for row, one in enumerate(requests):
        alone = engine.recommend(RequestBatch((one,)))
        for result, index in ((together, row), (backwards, len(requests) - 1 - row)):
            leaves, scores = rows(result, index)
            assert leaves == rows(alone, 0)[0]
            np.testing.assert_allclose(scores, rows(alone, 0)[1], atol=TOLERANCE)
    timings = together.timings
    levels = {f"{stage}.{level}" for stage in ("decode", "selection") for level in range(3)}
    assert set(timings) == {"context", "decode", "selection"} | levels
    assert all(seconds > 0 for seconds in timings.values())
    for stage in ("decode", "selection"):
        assert timings[stage] == pytest.approx(sum(timings[f"{stage}.{level}"] for level in range(3)))


def test_swapped_catalog_serves_from_the_next_batch_on(engine: ReferenceEngine) -> None:
    engine = ReferenceEngine(engine.model, engine.catalog, LIMITS, "cpu")
    one = request(engine, 5, 40, 11)
    smaller = make_catalog(5, items=7)
    engine.swap_catalog(smaller)
    leaves, _ = rows(engine.recommend(RequestBatch((one,))), 0)
    assert sorted(leaves) == list(range(smaller.trie.leaf_count))
    with pytest.raises(EngineError, match=r"codebooks \(12, 9, 16\): expected at most"):
        engine.swap_catalog(make_catalog(1, sizes=(12, 9, 16)))
    with pytest.raises(EngineError, match="codebooks"):
        engine.swap_catalog(make_catalog(1, sizes=(12, 9)))
    assert engine.catalog is smaller


def test_beyond_the_limits_is_refused_by_name(engine: ReferenceEngine) -> None:
    good = request(engine, 5, 4, 0)
    cases = [
        (RequestBatch(()), "batch of 0"),
        (RequestBatch((good,) * 7), "batch of 7 requests: expected 1 to 6"),
        (RequestBatch((good, dataclasses.replace(good, beam_width=41))), "request 1: beam width 41: expected 1 to 40"),
        (RequestBatch((dataclasses.replace(good, beam_width=0),)), "beam width 0"),
        (RequestBatch((request(engine, 21, 4, 0),)), r"history of shape \(21, 3\): expected \[0 to 20, 3\]"),
        (RequestBatch((dataclasses.replace(good, history=good.history + 15),)), "outside the codebooks"),
        (RequestBatch((dataclasses.replace(good, features=np.zeros(1, np.int32)),)), "features"),
    ]
    for batch, message in cases:
        with pytest.raises(EngineError, match=message):
            engine.recommend(batch)
    with pytest.raises(EngineError, match="context at most 64"):
        ReferenceEngine(engine.model, engine.catalog, dataclasses.replace(LIMITS, context=65), "cpu")


def test_warmup_runs_at_the_limits(engine: ReferenceEngine) -> None:
    seen: list[tuple[int, int]] = []
    recommend = engine.recommend
    engine.recommend = lambda batch: (
        seen.append(  # type: ignore[method-assign, assignment]
            (len(batch.requests[0].history), batch.requests[0].beam_width)
        )
        or recommend(batch)
    )
    try:
        engine.warmup()
    finally:
        del engine.recommend  # type: ignore[method-assign]
    assert seen == [(LIMITS.context, LIMITS.beam)]
