"""The drift guard as an operator sees it: other histories come in over HTTP, metrics and log tell of the fallback."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from loka_serve.build import main as build
from loka_serve.engines.base import SiteDrift
from loka_serve.server.metrics import ServerMetrics
from tests.building import ITEMS, build_arguments
from tests.server.processes import RunningServer, running

SITE = 'loka_drift_{}{{site="context.projection"}}'
HOME_CODES = 6
"""First codes below this are in the calibration histories; embeddings of the others are larger."""


def is_home(folder: Path) -> list[bool]:
    rows = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    return [row["semantic_id"][0] < HOME_CODES for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that was calibrated on one half of its catalog."""
    folder = tmp_path_factory.mktemp("drift")
    arguments = build_arguments(folder, "--recipe", "fp8_row", "--quiet", "--mods", "none", users=200)
    arguments[arguments.index("--calibration-rows") + 1] = "150"
    at_home = [f"item{index}" for index, home in enumerate(is_home(folder)) if home]
    generator = np.random.default_rng(0)
    rows = [
        {"user_id": f"u{user}", "history": generator.choice(at_home, 8).tolist(), "target": [at_home[0]]}
        for user in range(200)
    ]
    (folder / "histories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = next((folder / "checkpoint").glob("model*.safetensors"))
    tensors = load_file(weights)
    embedding = tensors["context.item_embeddings.0.weight"].clone()
    embedding[HOME_CODES:] *= 16
    save_file(tensors | {"context.item_embeddings.0.weight": embedding}, weights)
    assert build(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "loka_serve.serve", "--bundle", str(folder / "bundle"), "--port", "0"]
    with running([*command, "--device", "cpu", "--drift-sample-every", "1", "--drift-window", "20"]) as server:
        yield server


def ask(server: RunningServer, items: Sequence[str], count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(count):
        response = server.recommend(history=generator.choice(items, 8).tolist(), num_items=5)
        assert response.status_code == 200, response.text


def wait_for(server: RunningServer, series: str, value: float) -> None:
    """The judgement comes after the answer that led to it."""
    deadline = time.monotonic() + 5
    while server.metric(series) != value:
        assert time.monotonic() < deadline, server.client.get("/metrics").text
        time.sleep(0.02)


def test_another_domain_trips_the_fallback_and_the_old_one_ends_it(server: RunningServer, folder: Path) -> None:
    homes = is_home(folder)
    home = [f"item{index}" for index in range(ITEMS) if homes[index]]
    abroad = [f"item{index}" for index in range(ITEMS) if not homes[index]]
    assert (server.metric(SITE.format("site_in_fallback")), server.metric(SITE.format("fallbacks_total"))) == (0, 0)
    assert SITE.format("psi") not in server.client.get("/metrics").text  # nothing to judge by yet
    ask(server, home, 40, seed=1)
    assert server.metric(SITE.format("psi")) < 0.1
    assert 0.5 < server.metric(SITE.format("amax_ratio")) < 1.5  # the third largest of 20 against the largest of 150
    assert server.metric(SITE.format("site_in_fallback")) == 0
    ask(server, abroad, 20, seed=2)
    wait_for(server, SITE.format("site_in_fallback"), 1)
    assert server.metric(SITE.format("fallbacks_total")) == 1
    assert server.metric(SITE.format("psi")) > 0.2
    server.wait_for_log("WARNING engine: .*site context.projection drifted and runs in BF16", 5)
    ask(server, home, 45, seed=3)
    wait_for(server, SITE.format("site_in_fallback"), 0)
    assert server.metric(SITE.format("fallbacks_total")) == 1
    server.wait_for_log("site context.projection is calm and runs its recipe again", 5)


def test_metrics_of_a_fresh_engine_begin_anew_and_fallbacks_stay_counted() -> None:
    metrics = ServerMetrics()
    metrics.expect_drift(["a", "b"])
    metrics.set_drift([SiteDrift("a", 0.5, 3.0, True, True), SiteDrift("b", None, None, False)])
    text = metrics.exposition().decode()
    for line in (
        'loka_drift_psi{site="a"} 0.5',
        'loka_drift_amax_ratio{site="a"} 3.0',
        'loka_drift_site_in_fallback{site="a"} 1.0',
        'loka_drift_site_in_fallback{site="b"} 0.0',
        'loka_drift_fallbacks_total{site="a"} 1.0',
        'loka_drift_fallbacks_total{site="b"} 0.0',
    ):
        assert line in text
    assert 'loka_drift_psi{site="b"}' not in text
    metrics.set_drift([SiteDrift("a", 0.4, 2.0, True)])  # still, not again
    metrics.expect_drift(["a", "b"])
    text = metrics.exposition().decode()
    assert 'loka_drift_fallbacks_total{site="a"} 1.0' in text
    assert 'loka_drift_site_in_fallback{site="a"} 0.0' in text
    assert "loka_drift_psi{" not in text
