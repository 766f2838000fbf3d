"""The load test as a user runs it: exit codes, and what it takes for a right answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loadtest import answers
from tests.server.processes import ROOT, RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog


def locust(host: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        "loadtest/locustfile.py",
        "--headless",
        "--only-summary",
        "--host",
        host,
    ]
    load = ["--users", "4", "--spawn-rate", "4", "--run-time", "2s", "--stop-timeout", "2"]
    command = [*command, *load, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_all_right_is_exit_code_0(server: RunningServer, histories: Path) -> None:
    before = server.metric('loka_requests_total{outcome="ok",route="/v1/recommend"}')
    result = locust(server.url, "--p95-ms", "5000", LOKA_HISTORIES=str(histories))
    assert result.returncode == 0, result.stderr
    assert "passed: " in result.stderr
    answered = server.metric('loka_requests_total{outcome="ok",route="/v1/recommend"}') - before
    assert answered >= 10
    # Narrow (10), the model's own (16), and twice that.
    assert all(f"/v1/recommend, {beams} beams" in result.stdout + result.stderr for beams in (10, 16, 32))


def test_a_p95_above_its_bound_is_exit_code_1(server: RunningServer, histories: Path) -> None:
    result = locust(server.url, "--histories", str(histories), "--p95-ms", "5", "--beams", "12")
    assert result.returncode == 1
    assert "is above 5 ms" in result.stderr


def test_failed_requests_are_exit_code_1(server: RunningServer, histories: Path) -> None:
    result = locust(server.url, "--histories", str(histories), "--beams", "12,5")  # 5 beams cannot give 10 items
    assert result.returncode == 1
    assert "requests failed" in result.stderr
    assert "expected at least num_items = 10, got 5" in result.stdout + result.stderr


def test_without_histories_it_is_exit_code_2(server: RunningServer, tmp_path: Path) -> None:
    result = locust(server.url, "--histories", str(tmp_path / "none.jsonl"))
    assert result.returncode == 2
    assert "none.jsonl: no such file" in result.stderr


@pytest.mark.parametrize("beams", [(), ("--beams", "16")])
def test_a_server_that_is_not_there_ends_it_at_once_with_one_line(histories: Path, beams: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    host = f"http://127.0.0.1:{port}"
    result = locust(host, "--histories", str(histories), "--run-time", "1h", *beams)  # the helper gives it 60 s
    assert result.returncode == 1
    assert result.stderr.count(f"cannot reach {host}: ") == 1
    assert "Traceback" not in result.stderr + result.stdout
    assert "TypeError" not in result.stderr + result.stdout


def test_a_server_that_goes_away_ends_it(histories: Path, tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.safetensors"
    make_catalog().save(catalog)
    with running(scripted_command(catalog)) as server, ThreadPoolExecutor(1) as pool:
        arguments = ("--histories", str(histories), "--run-time", "1h", "--beams", "16")
        load = pool.submit(locust, server.url, *arguments)
        deadline = time.monotonic() + 50
        while not server.metric('loka_requests_total{outcome="ok",route="/v1/recommend"}'):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.process.kill()
        result = load.result()
    assert result.returncode == 1
    assert result.stderr.count(f"cannot reach {server.url}: ") == 1


def answer(*scores: float, complete: bool = True, item_ids: str = "abcdefgh") -> dict[str, Any]:
    return {"items": [{"item_id": item, "score": score} for item, score in zip(item_ids, scores, strict=False)],
            "complete": complete}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (answer(-1.0, -1.0, -2.0), None),
        (answer(-1.0, complete=False), None),
        (answer(-1.0), "1 items of 3, yet said to be complete"),
        (answer(-1.0, -1.0, -2.0, -3.0), "4 items, asked for 3"),
        (answer(-1.0, -2.0, -3.0, item_ids="aba"), "an item twice"),
        (answer(-1.0, -3.0, -2.0), "items not in the order of their scores"),
        ({"items": [{"item_id": "a", "score": None}], "complete": False}, "a score that is no number"),
        ({}, "no items"),
    ],
)
def test_what_is_a_right_answer(body: dict[str, Any], fault: str | None) -> None:
    assert answers.fault_of(body, 3) == fault


@pytest.mark.parametrize(
    ("num_items", "default", "limit", "mix"),
    [(10, 16, 128, [10, 16, 16, 32]), (10, 512, 512, [10, 512, 512, 512]), (20, 16, 128, [20, 20, 20, 40])],
)
def test_the_mix_of_beams(num_items: int, default: int, limit: int, mix: list[int]) -> None:
    assert answers.beam_mix(num_items, default, limit) == mix
