"""Starts a server as a user does, and talks to it over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.scripted_engine import scripted_score

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STITCHED = os.environ.get("LOKA_TEST_ENGINE", "scripted") == "tensorrt"
"""LOKA_TEST_ENGINE=tensorrt runs these tests with every ranking computed by the stitched executor on the CPU."""
STITCHED_FLAG = "--stitched"


class RunningServer:
    """A server process, its address and its log."""

    def __init__(self, command: Sequence[str]) -> None:
        self.log_file = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.directory = tempfile.TemporaryDirectory(prefix="loka-test-")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": self.directory.name}
        self.stitched = STITCHED_FLAG in command
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=self.log_file, stdout=self.log_file, env=environment)
        self.url = self.wait_for_log(r"listening on (http://[^;\s]+);")
        self.client = httpx.Client(base_url=self.url, timeout=30)

    @property
    def log(self) -> str:
        return Path(self.log_file.name).read_text()

    def wait_for_log(self, pattern: str, seconds: float = START_SECONDS) -> str:
        """The first group of the pattern, once the log has it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log)
            if found:
                return found[1] if found.groups() else found[0]
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{self.log}")

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.client.get("/health/ready").status_code == 200:
                return
            time.sleep(0.02)
        raise AssertionError(f"not ready:\n{self.log}")

    def left_behind(self) -> list[str]:
        """What it has put into its directory for temporary files."""
        return os.listdir(self.directory.name)

    def recommend(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/recommend", json=body)

    def expected_score(self, semantic_id: Sequence[int], leaf: int, history_length: int) -> Any:
        """What the score of an item equals, if the scripted engine answers."""
        if not self.stitched:
            return scripted_score(leaf, history_length)
        from tests.server.stitched_engine import stitched_score

        return pytest.approx(stitched_score(semantic_id), abs=1e-5)  # float32 sums of three log-probabilities

    def metric(self, name: str) -> float:
        """The value of one series, named with its labels as in the exposition."""
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series == name:
                return float(value)
        raise AssertionError(f"no series {name}")

    def engine_pid(self) -> int:
        """The one child of the API process that serves the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if "engine" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(found) == 1, found
        return found[0]

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        left_behind = self.left_behind()
        self.directory.cleanup()
        assert status == -signal.SIGKILL or left_behind == [], left_behind
        return status


@contextmanager
def running(command: Sequence[str], ready: bool = True) -> Iterator[RunningServer]:
    """A server that is stopped at the end of the block."""
    server = RunningServer(command)
    try:
        if ready:
            server.wait_until_ready()
        yield server
    finally:
        server.stop()


def scripted_command(
    catalog_file: Path, *flags: str, engine: Sequence[str] = (), stitched: bool = STITCHED
) -> list[str]:
    """The command of a server with the scripted engine; `stitched` has it compute its rankings."""
    arguments = [*engine, *([STITCHED_FLAG] if stitched else [])]
    return [sys.executable, "-m", "tests.server.scripted_server", str(catalog_file), *arguments, "--", *flags]
