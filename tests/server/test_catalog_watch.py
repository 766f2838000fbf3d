"""A watched file goes live when it is replaced; a bad one changes nothing and is named with its line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog
from tests.server.test_catalog_updates import jsonl

SECONDS = 30.0


@pytest.fixture
def watched(catalog_file: Path, tmp_path: Path) -> Iterator[tuple[RunningServer, Path]]:
    path = tmp_path / "items.jsonl"
    with running(scripted_command(catalog_file, "--watch-catalog", str(path))) as server:
        yield server, path


def replace(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def best_item(server: RunningServer) -> str:
    return str(server.recommend(history=[], num_items=1).json()["items"][0]["item_id"])


def wait_for_item(server: RunningServer, item_id: str) -> None:
    deadline = time.monotonic() + SECONDS
    while best_item(server) != item_id:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)


def test_a_replaced_file_goes_live_and_a_bad_one_does_not(watched: tuple[RunningServer, Path]) -> None:
    server, path = watched
    assert best_item(server) == "item-0"  # there is no file yet: the bundle's catalog
    replace(path, jsonl(make_catalog(30, prefix="new")))
    wait_for_item(server, "new-0")
    replace(path, jsonl(make_catalog(30, prefix="bad"), semantic_id=[300, 0, 0]))
    warning = server.wait_for_log(r"the live catalog stays: ([^\n]+)", SECONDS)
    assert "line 3" in warning and "semantic_id" in warning
    assert best_item(server) == "new-0"
    path.unlink()
    time.sleep(1.5)
    assert best_item(server) == "new-0" and server.log.count("the live catalog stays") == 1  # tried once
    replace(path, jsonl(make_catalog(30, prefix="newer")))
    wait_for_item(server, "newer-0")
    assert server.metric('loka_catalog_swaps_total{outcome="ok"}') == 2
