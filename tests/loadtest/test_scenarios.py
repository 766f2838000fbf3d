"""The scenarios are locust files that run: a spike that grows and ends by itself, and tenants told apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.processes import ROOT, RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    catalog = tmp_path_factory.mktemp("scenarios") / "catalog.safetensors"
    make_catalog().save(catalog)
    flags = ("--max-queue", "4", "--max-batch", "2", "--tenant-header", "X-Tenant")
    with running(scripted_command(catalog, *flags, engine=["--seconds", "0.02"])) as server:
        yield server


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenarios") / "histories.txt"
    path.write_text("".join(f"user-{user} item-{user} item-{user + 1}\n" for user in range(20)))
    return path


def locust(scenario: str, server: RunningServer, histories: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-f", f"loadtest/{scenario}.py", "--headless", "--host", server.url, "--histories", str(histories)]
    command = [sys.executable, "-m", "locust", *arguments, "--num-items", "3", "--beams", "4", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_spike_is_answered_or_refused_rightly(server: RunningServer, histories: Path) -> None:
    flags = ("--spike-seconds", "8", "--calm-users", "1", "--spike-users", "24")
    refused = locust("spike", server, histories, *flags)
    assert refused.returncode == 1 and "429" in refused.stdout + refused.stderr  # it is more than the server can take
    allowed = locust("spike", server, histories, *flags, "--allow-refusals")
    assert allowed.returncode == 0, allowed.stderr[-2000:]
    assert "passed: " in allowed.stderr


def test_tenants_are_told_apart(server: RunningServer, histories: Path) -> None:
    flags = ("--users", "12", "--spawn-rate", "12", "--run-time", "15s", "--allow-refusals")
    result = locust("tenants", server, histories, *flags)
    assert result.returncode == 0, result.stderr[-2000:]
    for label in ("small shop", "large shop", "nightly job"):
        assert f"/v1/recommend, {label}" in result.stdout + result.stderr
