"""The benchmark of stitching: both engines hold the same weights, and the row says what it is to say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.measure import random_batches
from benchmarks.stitched import Setting, compare, open_hopper, open_stitched, segment_calls
from loka_serve.engines.hopper.batches import BatchDecoder
from loka_serve.engines.hopper.buckets import Bucket
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.models.config import PRESETS
from tests.kernels.devices import DEVICE

CONFIG = dataclasses.replace(PRESETS["tiny"], layers=2, experts=4, codebook_sizes=(12, 9), kv_layers=1)
BUCKET = Bucket(2, 6, 9)


def setting(precision: str) -> Setting:
    return Setting(CONFIG, precision, (BUCKET.batch,), BUCKET.beam, BUCKET.context, torch.device(DEVICE))


def scores(decoder: BatchDecoder) -> NDArray[np.float32]:
    """Of each request's beams, best first."""
    result = decoder.collect(decoder.submit(random_batches(CONFIG, *dataclasses.astuple(BUCKET))[0]))
    assert not result.failed.any() and (result.counts == BUCKET.beam).all()
    return result.scores


def test_both_engines_hold_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # where nothing is measured
        monkeypatch.setattr("benchmarks.stitched.dispatch_for", lambda *arguments: Dispatch.unmeasured(DEVICE))
    opened = setting("fp8")
    hopper, dispatch = open_hopper(opened)
    (tmp_path / "weights").mkdir()
    stitched = open_stitched(opened, dispatch, tmp_path / "weights")
    found, wanted = scores(stitched), scores(hopper)
    # Activations are bfloat16 in both; E4M3 codes of inputs have one scale here and a scale a row there.
    assert np.abs(found - wanted).max() < 0.5 < wanted.max() - wanted.min()
    calls = segment_calls(stitched.stitching, BUCKET)
    assert calls[0] == ("context-projection", 2 * 10)
    assert {rows for _, rows in calls[1:]} == {2, 12}


def test_a_row_tells_what_segments_may_take() -> None:
    row = compare({"ms": 21.0, "device_ms": 20.0}, {"ms": 27.0, "device_ms": 26.0}, 10.0)
    assert row["between_ms"] == 16.0
    assert row["overhead"] == pytest.approx(0.3)
    assert row["segments_ms_to_be_level"] == 4.0
