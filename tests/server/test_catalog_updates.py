"""PUT /v1/catalog and rollback: swapped between batches, no failure, no answer mixed from two versions."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loka_serve.catalog.catalog import Catalog
from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog

CATALOG = make_catalog()
SWAPS = 'loka_catalog_swaps_total{{outcome="{}"}}'


def jsonl(catalog: Catalog, **changes: Any) -> bytes:
    """The items as a JSONL file; `changes` overwrite fields of the third line."""
    rows: list[dict[str, Any]] = [
        {
            "item_id": item_id,
            "semantic_id": list(catalog.semantic_id(index)),
            "popularity": float(catalog.popularity[index]),
            **{name: column.value_of(index) for name, column in catalog.attributes.items()},
        }
        for index, item_id in enumerate(catalog.item_ids)
    ]
    rows[2].update(changes)
    return b"\n".join(json.dumps(row).encode() for row in rows)


@pytest.fixture(scope="module")
def server(catalog_file: Path) -> Iterator[RunningServer]:
    with running(scripted_command(catalog_file, "--allow-catalog-updates", "--max-catalog-bytes", "20000")) as server:
        yield server


@pytest.fixture(autouse=True)
def original(server: RunningServer) -> None:
    """Each test starts with the first catalog live."""
    if server.client.get("/v1/catalog").json()["version"] != CATALOG.version:
        assert put(server, jsonl(CATALOG)).status_code == 200


def put(server: RunningServer, body: bytes) -> httpx.Response:
    return server.client.put("/v1/catalog", content=body, headers={"content-type": "application/x-ndjson"})


def first_item(server: RunningServer) -> tuple[str, str]:
    """(catalog version, best item) of an answer."""
    body = server.recommend(history=[], num_items=1).json()
    return body["catalog_version"], body["items"][0]["item_id"]


def test_replace_and_roll_back(server: RunningServer) -> None:
    new = make_catalog(30, prefix="new")
    response = put(server, jsonl(new))
    assert response.status_code == 200, response.text
    info = response.json()
    assert (info["items"], info["previous_version"]) == (30, CATALOG.version)
    assert first_item(server) == (info["version"], "new-0")
    assert server.client.get("/v1/catalog").json() == info
    assert server.metric(f'loka_catalog_info{{version="{info["version"]}"}}') == 1
    assert CATALOG.version not in server.client.get("/metrics").text
    back = server.client.post("/v1/catalog/rollback").json()
    assert (back["version"], back["previous_version"]) == (CATALOG.version, info["version"])
    assert first_item(server) == (CATALOG.version, "item-0")
    assert server.client.post("/v1/catalog/rollback").json()["version"] == info["version"]
    assert first_item(server) == (info["version"], "new-0")


def test_the_same_content_changes_nothing(server: RunningServer) -> None:
    first = put(server, jsonl(make_catalog(30, prefix="new"))).json()
    assert put(server, jsonl(make_catalog(30, prefix="new"))).json() == first


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "expected a JSONL or Parquet file, got nothing"),
        (b'{"item_id": "a"', "catalog.jsonl"),
        (jsonl(CATALOG, semantic_id=[300, 0, 0]), "line 3"),
        (jsonl(CATALOG, item_id="item-0"), "line 3"),
        (jsonl(CATALOG, semantic_id=None), "semantic_id"),
        (b"PAR1 but not Parquet", "catalog.parquet"),
    ],
)
def test_a_bad_file_leaves_the_live_catalog_and_says_where(server: RunningServer, body: bytes, words: str) -> None:
    response = put(server, body)
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == "body"
    assert words in error["message"]
    assert "/" not in error["message"].replace("JSONL", "")  # no path of the server
    assert first_item(server) == (CATALOG.version, "item-0")


def test_a_file_that_is_too_large_is_413(server: RunningServer) -> None:
    assert put(server, b" " * 20_001).status_code == 413
    assert first_item(server)[0] == CATALOG.version


def test_there_is_nothing_to_roll_back_to_at_first(scripted: RunningServer) -> None:
    response = scripted.client.post("/v1/catalog/rollback")
    assert (response.status_code, response.json()["detail"]) == (409, "there is no catalog to roll back to")


def test_updates_are_off_unless_allowed(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file)) as server:
        assert put(server, jsonl(make_catalog(30))).status_code == 403
        assert server.client.post("/v1/catalog/rollback").status_code == 403


def test_the_catalog_survives_the_engine(server: RunningServer) -> None:
    version = put(server, jsonl(make_catalog(30, prefix="new"))).json()["version"]
    os.kill(server.engine_pid(), signal.SIGKILL)
    time.sleep(0.3)
    server.wait_until_ready()
    assert first_item(server) == (version, "new-0")
    assert server.client.post("/v1/catalog/rollback").status_code == 200
    assert first_item(server) == (CATALOG.version, "item-0")


def test_swaps_under_load_fail_nothing_and_never_mix_versions(server: RunningServer) -> None:
    catalogs = [make_catalog(20 + index, prefix=f"c{index}") for index in range(3)]
    prefix_of = {CATALOG.version: "item"}
    answers: list[dict[str, Any]] = []
    failures: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            while not stop.is_set():
                response = client.post("/v1/recommend", json={"history": ["c1-3"], "num_items": 12})
                if response.status_code == 200:
                    answers.append(response.json())
                else:
                    failures.append(response.text)

    counted = {outcome: server.metric(SWAPS.format(outcome)) for outcome in ("ok", "invalid")}
    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    swaps = 0
    try:
        for index in (0, 1, 2, 0):
            response = put(server, jsonl(catalogs[index]))
            prefix_of[response.json()["version"]] = f"c{index}"
            swaps += response.status_code == 200
        assert put(server, b"{").status_code == 422
        swaps += server.client.post("/v1/catalog/rollback").status_code == 200
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert (swaps, failures) == (5, [])
    assert len({answer["catalog_version"] for answer in answers}) >= 3
    for answer in answers:
        prefixes = {item["item_id"].rsplit("-", 1)[0] for item in answer["items"]}
        assert prefixes == {prefix_of[answer["catalog_version"]]}
    assert server.metric(SWAPS.format("ok")) == counted["ok"] + 5
    assert server.metric(SWAPS.format("invalid")) == counted["invalid"] + 1


def test_a_problem_does_not_repeat_all_that_was_sent(server: RunningServer) -> None:
    response = put(server, json.dumps({"item_id": "a", "semantic_id": "b" * 15_000}).encode())
    assert response.status_code == 422
    assert "line 1" in response.text
    assert len(response.content) < 3000
