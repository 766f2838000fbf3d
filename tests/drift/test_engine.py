"""Which engines come under guard, and that the guard's are watched while they recommend."""

from __future__ import annotations

import logging
from typing import Any, cast

import numpy as np
import pytest

from loka_serve.drift.engine import GuardedEngine, guarded
from loka_serve.drift.options import DriftOptions
from loka_serve.engines.base import DriftWatchingEngine, Engine, RequestBatch
from tests.drift.models import ABROAD, CONFIG, DRIFTED, HOME, make_engine, requests


def test_a_guarded_engine_answers_as_before_and_reports() -> None:
    engine, probe = make_engine()
    question = RequestBatch(requests(HOME, 5, 1))
    expected = engine.recommend(question)
    watched = guarded(engine, probe, DriftOptions(sample_every=1, window=15))
    assert isinstance(watched, DriftWatchingEngine) and watched.drift_sites == tuple(engine.model.sites())
    assert (watched.name, watched.limits) == ("reference", engine.limits)
    watched.warmup()
    assert watched.judge_drift() is None  # warming up is nobody's traffic
    np.testing.assert_array_equal(watched.recommend(question).scores, expected.scores)
    for seed in range(2):
        watched.recommend(RequestBatch(requests(ABROAD, 5, seed)))
    drifts = {drift.site: drift for drift in watched.judge_drift() or []}
    assert drifts[DRIFTED].fell_back and drifts[DRIFTED].in_fallback
    catalog = engine.catalog
    watched.swap_catalog(catalog)
    assert engine.catalog is catalog and CONFIG.levels == catalog.levels


def test_no_guard_when_off_or_with_another_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine, probe = make_engine()
    assert guarded(engine, probe, DriftOptions(sample_every=0)) is engine

    class Hopper:
        name = "hopper"

    other = cast(Engine, Hopper())
    with caplog.at_level(logging.INFO):
        assert guarded(other, probe, DriftOptions()) is other
    assert "no drift guard: it watches the reference engine alone, not hopper" in caplog.text


def test_sites_without_a_histogram_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    engine, probe = make_engine()
    sites: list[dict[str, Any]] = probe["sites"]
    del sites[0]["inputs"]["octaves"]
    sites[1]["inputs"]["octaves"] = {}
    watched = guarded(engine, probe, DriftOptions())
    assert isinstance(watched, GuardedEngine)
    assert watched.drift_sites == tuple(site["name"] for site in sites[2:])
    assert "no drift guard for 2 sites" in caplog.text
