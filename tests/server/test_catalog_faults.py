"""A swap that the engine refuses, or that takes long, or costs the engine: the catalog before serves on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_engine import BROKEN, LOST, NEVER, REFUSED, SLOWLY, SWAP_SECONDS
from tests.server.scripted_server import make_catalog
from tests.server.test_catalog_updates import CATALOG, SWAPS, first_item, jsonl, put

BATCH_TIMEOUT, SWAP_TIMEOUT = 1.0, 5.0  # around SWAP_SECONDS


@pytest.fixture
def server(catalog_file: Path) -> Iterator[RunningServer]:
    flags = ("--engine-batch-timeout-s", str(BATCH_TIMEOUT), "--engine-start-timeout-s", str(SWAP_TIMEOUT))
    with running(scripted_command(catalog_file, "--allow-catalog-updates", *flags)) as server:
        yield server


def uploads_left(server: RunningServer) -> list[Path]:
    return list(Path(server.directory.name).glob("loka-catalogs-*/*"))


def wait_until_no_uploads_left(server: RunningServer) -> None:
    deadline = time.monotonic() + 5
    while uploads_left(server):
        assert time.monotonic() < deadline, uploads_left(server)
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [(REFUSED, "catalog: needs 2.0 GiB, but 1.0 GiB are free"), (BROKEN, "unexpected ValueError")],
)
def test_a_catalog_that_the_engine_refuses_is_409_and_changes_nothing(
    server: RunningServer, prefix: str, reason: str
) -> None:
    engine = server.engine_pid()
    for _ in range(2):  # the second time, too
        response = put(server, jsonl(make_catalog(30, prefix=prefix)))
        assert (response.status_code, response.json()["type"]) == (409, "urn:loka-serve:problem:conflict")
        detail = f"the engine does not take the catalog: {reason}; the live one is unchanged"
        assert response.json()["detail"] == detail
        assert first_item(server) == (CATALOG.version, "item-0")
    assert server.client.get("/v1/catalog").json()["previous_version"] is None
    assert server.metric(SWAPS.format("conflict")) == 2
    wait_until_no_uploads_left(server)
    assert server.engine_pid() == engine
    version = put(server, jsonl(make_catalog(30, prefix="new"))).json()["version"]
    assert first_item(server) == (version, "new-0")
    assert server.metric("loka_engine_restarts_total") == 0


def test_a_swap_longer_than_the_batch_timeout_restarts_nothing(server: RunningServer) -> None:
    assert BATCH_TIMEOUT < SWAP_SECONDS < SWAP_TIMEOUT
    engine = server.engine_pid()
    with ThreadPoolExecutor(2) as pool:
        update = pool.submit(put, server, jsonl(make_catalog(30, prefix=SLOWLY)))
        server.wait_for_log("swapping to catalog")
        patient = pool.submit(server.recommend, history=[], timeout_ms=60_000)
        # Each waits within its own deadline.
        assert server.recommend(history=[], timeout_ms=200).status_code == 504
        response = update.result()
        assert (patient.result().status_code, patient.result().json()["catalog_version"]) == (200, CATALOG.version)
    assert response.status_code == 200, response.text
    version = response.json()["version"]
    assert first_item(server) == (version, f"{SLOWLY}-0")
    assert server.client.post("/v1/catalog/rollback").status_code == 200
    assert first_item(server) == (CATALOG.version, "item-0")
    assert server.metric("loka_engine_restarts_total") == 0
    assert server.engine_pid() == engine


@pytest.mark.parametrize(
    ("prefix", "log"),
    [
        (LOST, "the engine process ended with status 1"),
        (NEVER, f"the engine hangs: no end of a catalog swap within {SWAP_TIMEOUT:g} s"),
    ],
)
def test_a_swap_that_costs_the_engine_is_503_and_not_tried_again(server: RunningServer, prefix: str, log: str) -> None:
    response = put(server, jsonl(make_catalog(30, prefix=prefix)))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["detail"] == "the engine did not take the catalog; the live one is unchanged"
    server.wait_for_log(re.escape(log))
    server.wait_until_ready()
    assert first_item(server) == (CATALOG.version, "item-0")
    assert server.metric("loka_engine_restarts_total") == 1
    wait_until_no_uploads_left(server)


def test_an_engine_that_comes_back_has_swapped_before_it_is_ready(server: RunningServer) -> None:
    version = put(server, jsonl(make_catalog(30, prefix=SLOWLY))).json()["version"]
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_for_log("status -9")
    server.wait_until_ready()
    started = time.monotonic()
    assert first_item(server) == (version, f"{SLOWLY}-0")
    assert time.monotonic() - started < SWAP_SECONDS / 2  # the swap was part of the start
