"""Catalogs and servers that several files of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog


@pytest.fixture(scope="session")
def catalog_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted server's catalog, compiled."""
    path = tmp_path_factory.mktemp("catalog") / "catalog.safetensors"
    make_catalog().save(path)
    return path


@pytest.fixture(scope="module")
def scripted(catalog_file: Path) -> Iterator[RunningServer]:
    """A server whose engine does as the history says; each module that asks gets its own."""
    flags = ("--max-batch", "16", "--max-delay-ms", "30", "--max-body-bytes", "20000", "--max-batch-requests", "20")
    with running(scripted_command(catalog_file, *flags, "--allow-catalog-updates")) as server:
        yield server
