"""Collection from one batch in N: which batches, what is seen, what it leaves behind, how windows merge."""

from __future__ import annotations

import pytest
import torch

from loka_serve.engines.base import RequestBatch
from loka_serve.probe.collect import collect
from loka_serve.probe.online import OnlineProbe
from tests.probe.test_collect import make_engine, make_requests


def test_one_batch_in_n_is_sampled() -> None:
    probe = OnlineProbe({}, every=3)
    assert [probe.begin_batch() for _ in range(7)] == [True, False, False, True, False, False, True]
    assert (probe.batches, probe.sampled) == (7, 3)


def test_watching_every_batch_sees_what_calibration_sees() -> None:
    engine, requests = make_engine(), make_requests(8)
    expected = collect(engine, engine.model, requests)
    probe = OnlineProbe(engine.model.sites(), every=1, max_rows=0)
    for start in (0, 4):
        with probe.watching(engine.model) as observed:
            assert observed
            engine.recommend(RequestBatch(tuple(requests[start : start + 4])))
    for name, site in probe.sites.items():
        assert site.total().summary() == expected[name].total().summary()
        assert [group.rows for group in site.group_statistics.groups] if site.group_statistics else True
    assert all(site.observer is None for site in engine.model.sites().values())


def test_batches_in_between_are_left_alone() -> None:
    engine, requests = make_engine(), make_requests(4)
    probe = OnlineProbe(engine.model.sites(), every=2)
    answers = []
    for _ in range(2):
        with probe.watching(engine.model) as observed:
            answers.append((observed, engine.recommend(RequestBatch(tuple(requests)))))
    rows = {name: site.total().rows for name, site in probe.sites.items()}
    assert [observed for observed, _ in answers] == [True, False]
    assert rows["heads.0"] == 4  # of one batch
    assert (answers[0][1].scores == answers[1][1].scores).all()  # watching changes no answer


def test_no_more_rows_than_asked_for_evenly_spaced() -> None:
    engine = make_engine()
    probe = OnlineProbe(engine.model.sites(), max_rows=10)
    rows = torch.arange(95.0)[:, None].expand(95, engine.model.config.d_model)
    probe.observe("heads.0", rows)
    summary = probe.sites["heads.0"].total().summary()
    assert summary.rows == 10 and summary.absmax == 90.0  # 0, 10, .. 90


def test_steps_are_looked_at_in_proportion_to_their_rows() -> None:
    engine = make_engine()
    probe = OnlineProbe(engine.model.sites(), every=1, max_rows=16)
    requests = make_requests(4)  # 4 rows at the first level, 4 * 8 at the others: twice what is looked at
    with probe.watching(engine.model, call_rows=32):
        engine.recommend(RequestBatch(tuple(requests)))
    rows = {name: site.total().rows for name, site in probe.sites.items()}
    assert [rows[f"heads.{level}"] for level in range(3)] == [2, 16, 16]
    assert rows["layers.0.mlp.down"] == 2 + 16 + 16
    assert rows["layers.1.moe.gate_up"] == 2 * (2 + 16 + 16)  # each beam twice
    assert rows["context.projection"] == 14  # of 4 * 7
    with probe.watching(engine.model):  # as before: up to 16 rows of each call
        engine.recommend(RequestBatch(tuple(requests)))
    assert probe.sites["layers.0.mlp.down"].total().rows == 34 + 4 + 16 + 16


def test_groups_are_kept_apart_when_rows_are_left_out() -> None:
    engine = make_engine()
    site = engine.model.sites()["layers.1.moe.down"]
    probe = OnlineProbe({"experts": site}, max_rows=5, covariance=True)
    offsets = torch.tensor([0, 4, 4, 4, 10, 10, 10, 10, 10])
    probe.observe("experts", torch.ones(10, site.in_features), offsets)  # rows 0, 2, 4, 6, 8
    groups = probe.sites["experts"].group_statistics
    gaussian = probe.sites["experts"].gaussian
    assert groups is not None and [group.rows for group in groups.groups] == [2, 0, 0, 3, 0, 0, 0, 0]
    assert gaussian is not None and gaussian.counts.tolist() == [2, 0, 0, 3, 0, 0, 0, 0]


def test_windows_are_taken_and_merged() -> None:
    engine = make_engine()
    width = engine.model.config.d_model
    probe, worker = (OnlineProbe(engine.model.sites()) for _ in range(2))
    probe.observe("heads.0", torch.ones(3, width))
    window = probe.take()
    assert window["heads.0"].total().rows == 3 and probe.sites["heads.0"].total().rows == 0
    worker.observe("heads.0", torch.ones(2, width))
    worker.merge(window)
    assert worker.sites["heads.0"].total().rows == 5
    with pytest.raises(ValueError, match="site other: expected one of this model's"):
        worker.merge({"other": window["heads.0"]})
    with pytest.raises(ValueError, match="site heads.1: its statistics are of another shape"):
        worker.merge({"heads.0": window["heads.0"], "heads.1": window["layers.1.moe.down"]})
    assert worker.sites["heads.0"].total().rows == 5  # all or nothing


def test_memory_is_bounded() -> None:
    engine = make_engine()
    probe = OnlineProbe(engine.model.sites(), every=1)
    before = probe.state_bytes()
    with probe.watching(engine.model):
        engine.recommend(RequestBatch(tuple(make_requests(4))))
    assert probe.state_bytes() == before > 0


def test_an_engine_that_fails_leaves_no_observer() -> None:
    engine = make_engine()
    probe = OnlineProbe(engine.model.sites())
    with pytest.raises(RuntimeError, match="broken"), probe.watching(engine.model):
        raise RuntimeError("broken")
    assert all(site.observer is None for site in engine.model.sites().values())


def test_impossible_settings() -> None:
    with pytest.raises(ValueError, match="every 0 and max_rows -1"):
        OnlineProbe({}, every=0, max_rows=-1)
