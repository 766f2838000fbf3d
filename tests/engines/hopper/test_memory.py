"""The estimate of workspaces, and the refusal of what a device cannot hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loka_serve.engines.hopper.buckets import Bucket
from loka_serve.engines.hopper.memory import GIB, MemoryReport, workspace_bytes
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.errors import EngineError
from loka_serve.models.config import PRESETS

CONFIG = PRESETS["onerec-v2-4b-a0.5b"]


def test_the_estimate_covers_what_must_be_held_at_once() -> None:
    bucket = Bucket(batch=8, beam=512, context=3000)
    rows = 8 * 512
    caches = 2 * 14 * 2 * rows * 1408 * 2
    logits = 2 * rows * 8192 * 4
    keys = 8 * 3001 * 1408 * 2
    estimate = workspace_bytes(CONFIG, bucket, HopperOptions())
    assert caches + logits + keys < estimate < 2 * (caches + logits + keys)


@pytest.mark.parametrize("field", ["batch", "beam", "context"])
def test_the_estimate_grows_with_every_size(field: str) -> None:
    bucket = Bucket(batch=8, beam=512, context=3000)
    larger = dataclasses.replace(bucket, **{field: 2 * getattr(bucket, field)})
    assert workspace_bytes(CONFIG, larger, HopperOptions()) > workspace_bytes(CONFIG, bucket, HopperOptions())


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    report = MemoryReport(torch.device("cuda"), total=100 * GIB, free=30 * GIB, weights=60 * GIB)
    bucket = Bucket(16, 512, 3000)
    report.require(20 * GIB, bucket, HopperOptions(memory_share=0.9))
    assert report.workspaces == 20 * GIB
    with pytest.raises(EngineError, match=r"batch 16, beam 512, context 3000: need 21\.0 GiB .* 20\.0 GiB of 100\.0"):
        report.require(21 * GIB, bucket, HopperOptions(memory_share=0.9))


def test_the_report_names_every_part() -> None:
    report = MemoryReport(torch.device("cpu"), 0, 0, weights=3 * GIB, catalog=GIB, graphs=2 * GIB)
    line = report.describe()
    assert "weights 3.00" in line and "catalog 1.00" in line and "graphs 2.00" in line
    report.require(1 << 60, Bucket(1, 1, 1), HopperOptions())  # without a device nothing is limited


def test_a_larger_catalog_needs_room_beside_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    report = MemoryReport(torch.device("cuda"), total=100 * GIB, free=90 * GIB, weights=5 * GIB, workspaces=20 * GIB)
    monkeypatch.setattr(MemoryReport, "free_now", lambda self: 40 * GIB)
    options = HopperOptions(memory_share=0.9)
    report.require_catalog(10 * GIB, options)
    expected = r"needs 11\.00 GiB and 20\.00 GiB of workspaces .* 30\.00 GiB of 100\.00 GiB are free"
    with pytest.raises(EngineError, match=expected):
        report.require_catalog(11 * GIB, options)
    MemoryReport(torch.device("cpu"), 0, 0, weights=0).require_catalog(1 << 60, options)  # limited by no device
