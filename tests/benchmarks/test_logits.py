"""Logits of the two engines for the same beams."""

from __future__ import annotations

import pytest
import torch

from loka_serve.engines.base import RequestBatch
from tests.kernels.devices import DEVICE

pytest.importorskip("triton")
from benchmarks.logits import compare_logits, logits_of  # noqa: E402
from loka_serve.engines.hopper.options import HopperOptions  # noqa: E402
from tests.engines.hopper.test_decoder import RECENCY, make_pair, make_request  # noqa: E402


def test_differences_are_of_live_beams_and_from_the_mean() -> None:
    expected = torch.tensor([[[1.0, -1.0], [3.0, -3.0]]])
    shifted = expected + 5.0
    shifted[0, 1] = torch.tensor([100.0, 0.0])  # a dead beam
    (row,) = compare_logits([shifted], [expected], [torch.tensor([1])])
    assert row == {"level": 0, "beams": 1, "relative_rms": 0.0, "largest": 0.0, "rms": 1.0}
    (row,) = compare_logits([expected * 1.5], [expected], [torch.tensor([2])])
    assert row["relative_rms"] == pytest.approx(0.5) and row["largest"] == pytest.approx(1.5) and row["beams"] == 2


def test_the_decoders_logits_are_the_references() -> None:
    pair = make_pair(RECENCY, "bf16", HopperOptions(graphs=DEVICE == "cuda"))
    batch = RequestBatch((make_request(pair.catalog, 5, 6, 1), make_request(pair.catalog, 9, 4, 2)))
    traces = pair.decoder.trace(batch)
    rows = compare_logits(
        [trace.logits for trace in traces], logits_of(pair.reference, batch, traces), [trace.counts for trace in traces]
    )
    assert [row["beams"] for row in rows] == [2, 10, 10]
    # Activations are bfloat16 here and float32 there: 2^-9 a rounding, some dozens of them on the way.
    assert all(0 < row["relative_rms"] < 0.02 for row in rows)
    swapped = [trace.logits.flip(-1) for trace in traces]  # other codes' logits are far off
    rows = compare_logits(swapped, logits_of(pair.reference, batch, traces), [trace.counts for trace in traces])
    assert rows[1]["relative_rms"] > 0.2 and pair.decoder._traced is None
