"""What trips the guard and what does not, how a fallen site computes, and how it comes back."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from loka_serve.drift.guard import DriftGuard, read_baselines
from loka_serve.drift.options import DriftOptions
from loka_serve.drift.window import Window
from loka_serve.engines.base import RequestBatch
from loka_serve.errors import BundleError
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.recipes import RECIPES
from tests.drift.models import ABROAD, CONFIG, DRIFTED, HOME, Watched, make_engine, requests


def test_ordinary_traffic_trips_nothing_in_10000_requests() -> None:
    watched = Watched()
    worst = watched.run(HOME, 10_000, seed=2)
    assert set(worst) == set(watched.model.sites())
    assert watched.fallen() == set()
    assert max(worst.values()) < watched.guard._options.psi_limit / 2  # far from it, at every one of 200 judgements


def test_histories_of_another_domain_move_the_metric_and_trip_the_fallback(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    before = watched.run(HOME, 200, seed=3)
    with caplog.at_level(logging.WARNING):
        during = watched.run(ABROAD, 200, seed=4)
    assert before[DRIFTED] < 0.1 < 1.0 < during[DRIFTED]
    assert DRIFTED in watched.fallen()
    assert f"site {DRIFTED} drifted and runs in BF16: stability index" in caplog.text


@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_block", "fp8_tensor"])
def test_a_fallen_site_computes_in_bf16_with_the_dequantized_weight(recipe: str) -> None:
    watched, (other, _) = Watched(recipe, amax_ratio=1.5), make_engine(recipe)
    watched.run(ABROAD, 200, seed=5)
    fallen = watched.fallen()
    assert DRIFTED in fallen
    question = RequestBatch(requests(ABROAD, 8, seed=6))
    quantized = other.recommend(question)
    unquantized = OneRecV2(CONFIG).initialize(0).sites()
    for name in fallen:
        module, original = other.model.sites()[name], unquantized[name].weight
        assert original is not None
        state = RECIPES[recipe].quantize_weight(original.data, input_amax=1.0)
        weight = RECIPES[recipe].dequantize_weight(state)
        module.method = RECIPES["bf16"].prepare({"weight": weight.bfloat16()})
    expected, found = other.recommend(question), watched.engine.recommend(question)
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(found.leaves, expected.leaves)
    assert np.abs(found.scores - quantized.scores)[np.isfinite(found.scores)].max() > 1e-3


def test_a_site_comes_back_once_a_whole_window_is_calm(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    question = RequestBatch(requests(HOME, 8, seed=7))
    first = watched.engine.recommend(question)
    watched.run(ABROAD, 200, seed=8)
    assert DRIFTED in watched.fallen()
    watched.run(ABROAD, 200, seed=9)
    assert DRIFTED in watched.fallen()  # not calm
    watched.run(HOME, 50, seed=10)
    assert DRIFTED in watched.fallen()  # the window still has the others
    with caplog.at_level(logging.WARNING):
        watched.run(HOME, 400, seed=11)
    assert watched.fallen() == set()
    assert f"site {DRIFTED} is calm and runs its recipe again" in caplog.text
    np.testing.assert_array_equal(watched.engine.recommend(question).scores, first.scores)


def test_between_the_limit_and_half_of_it_a_site_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(psi_limit=0.2)
    states = []
    for seed, psi in enumerate((0.2, 0.21, 0.11, 0.2, 0.1, 0.2)):
        monkeypatch.setattr(Window, "stability_index", lambda self, psi=psi: psi)
        watched.run(HOME, 150, seed=20 + seed)
        states.append(bool(watched.fallen()))
    assert states == [False, True, True, True, False, False]


def test_nobody_is_judged_before_the_window_is_full() -> None:
    watched = Watched(window=150)
    for count, judged in ((50, False), (50, False), (50, True)):
        batch = RequestBatch(requests(ABROAD, count, count))
        with watched.guard.watching(batch):
            watched.engine.recommend(batch)
        drifts = watched.guard.judge()
        assert drifts is not None
        assert {drift.psi is not None for drift in drifts} == {judged}
        assert any(drift.fell_back for drift in drifts) == judged
    assert watched.guard.judge() is None  # nothing new


def test_one_batch_in_n_is_looked_at_and_failed_ones_are_not() -> None:
    watched = Watched(sample_every=2, window=1)
    batch = RequestBatch(requests(HOME, 5, 0))
    with pytest.raises(RuntimeError, match="broken"), watched.guard.watching(batch):
        watched.engine.recommend(batch)
        raise RuntimeError("broken")
    news = []
    for _ in range(4):
        with watched.guard.watching(batch):
            watched.engine.recommend(batch)
        news.append(watched.guard.judge() is not None)
    assert news == [False, True, False, True]  # the failed one was the first
    assert all(len(site.window._batches) == 2 for site in watched.guard._sites.values())


def test_a_site_in_bf16_is_measured_and_left_alone() -> None:
    engine, probe = make_engine()
    baselines = {name: inputs for name, inputs in read_baselines(probe).items() if name.startswith("heads.")}
    guard = DriftGuard(engine.model, baselines, DriftOptions(1, 3, psi_limit=1e-9))
    methods = {name: engine.model.sites()[name].method for name in baselines}
    for seed in range(4):
        batch = RequestBatch(requests(HOME, 5, seed))
        with guard.watching(batch):
            engine.recommend(batch)
    drifts = guard.judge()
    assert drifts is not None and [drift.site for drift in drifts] == ["heads.0", "heads.1", "heads.2"] == list(
        guard.sites
    )
    assert all(drift.psi is not None and drift.psi > 1e-9 and not drift.in_fallback for drift in drifts)
    assert {name: engine.model.sites()[name].method for name in baselines} == methods


@pytest.mark.parametrize(
    "probe",
    [
        {},
        {"sites": 3},
        {"sites": [{"name": "a"}]},
        {"sites": [{"name": "a", "inputs": {"octaves": {"0": 1}}}]},
        {"sites": [{"name": "a", "inputs": {"octaves": {"99": 1}, "absmax": 1.0}}]},
        {"sites": [{"name": "a", "inputs": {"octaves": {"0": 1}, "absmax": None}}]},
    ],
)  # fmt: skip
def test_damaged_evidence_is_named(probe: dict) -> None:
    with pytest.raises(BundleError, match=re.escape('probe.json: "sites": expected name, inputs.octaves')):
        read_baselines(probe)
