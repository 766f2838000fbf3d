"""A server to load, and histories to send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog


@pytest.fixture(scope="session")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loadtest") / "histories.jsonl"
    rows = [{"user_id": f"u{user}", "history": [f"item-{user}", "item-7"]} for user in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    catalog = tmp_path_factory.mktemp("catalog") / "catalog.safetensors"
    make_catalog().save(catalog)
    with running(scripted_command(catalog, engine=["--seconds", "0.02"])) as server:
        yield server
