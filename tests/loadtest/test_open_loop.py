"""The open loop: arrivals, latency from the scheduled arrival, figures, command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.bodies import Template, template
from loadtest.closed_loop import run_closed
from loadtest.open_loop import Load, poisson_arrivals, run
from loadtest.samples import SAMPLE, Samples
from loadtest.summary import summarize
from tests.server.processes import ROOT, RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog

STALL_SECONDS = 1.0


def test_arrivals_are_poisson() -> None:
    times = poisson_arrivals(200.0, 100.0, np.random.default_rng(1))
    assert abs(len(times) - 20_000) < 5 * np.sqrt(20_000)  # five standard deviations
    gaps = np.diff(times)
    assert gaps.min() >= 0 and times[-1] < 100.0
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)  # 1 for exponential gaps, 0 for a fixed beat
    assert np.mean(gaps > gaps.mean()) == pytest.approx(np.exp(-1), abs=0.02)
    assert np.array_equal(times, poisson_arrivals(200.0, 100.0, np.random.default_rng(1)))


@contextmanager
def stalling_server() -> Iterator[str]:
    """Answers at once, but for one second after the 50th request it answers nobody."""
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), [0]
    count, free_at = [0], [0.0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            count[0] += 1
            if count[0] == 50:
                free_at[0] = loop.time() + STALL_SECONDS
            await asyncio.sleep(max(0.0, free_at[0] - loop.time()))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async def start() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port[0] = server.sockets[0].getsockname()[1]
        ready.set()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    loop.set_exception_handler(lambda *_: None)  # a client that closes ends its reader
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop)
    assert ready.wait(10)
    yield f"http://127.0.0.1:{port[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_a_stall_shows_in_every_request_that_was_due_meanwhile() -> None:
    with stalling_server() as url:
        samples = run(Load(url, rate=60.0, seconds=2.5), [Template(b"{}")])
    assert (samples.rows["status"] == 200).all()
    # Of the arrivals of one second, those of its first half wait longer than half a second: 30 on average, and five
    # standard deviations less at least. A closed loop of one client would have seen one slow request.
    assert (samples.latency > STALL_SECONDS / 2).sum() >= 30 - 5 * np.sqrt(30)
    with stalling_server() as url:
        closed = run_closed(url, [Template(b"{}")], clients=1, seconds=2.0)
    assert (closed.latency > STALL_SECONDS / 2).sum() == 1
    assert len(closed.rows) > 50


def test_processes_share_the_same_arrivals(server: RunningServer) -> None:
    requests = [template({"history": ["item-1"], "num_items": 5}, name=name) for name in ("a", "b")]
    load = Load(server.url, rate=80.0, seconds=1.5, warmup_seconds=0.5, processes=2, seed=3)
    samples = run(load, requests)
    arrivals = poisson_arrivals(80.0, 2.0, np.random.default_rng(3)) - 0.5
    assert np.allclose(samples.rows["scheduled"], arrivals)
    summary = summarize(samples)
    assert summary["requests"] == (arrivals >= 0).sum() == summary["right"]
    assert {name: row["requests"] for name, row in summary["by_name"].items()} == {
        name: int((samples.rows["template"][arrivals >= 0] == index).sum()) for index, name in enumerate("ab")
    }
    assert summary["faults"] == {} and summary["goodput"]["share"] == 1.0


def test_refusals_are_counted_with_their_latency(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.safetensors"
    make_catalog().save(catalog)
    command = scripted_command(catalog, "--max-queue", "1", "--max-batch", "1", engine=["--seconds", "0.1"])
    with running(command) as server:
        samples = run(Load(server.url, rate=60.0, seconds=2.0), [template({"history": ["item-1"], "num_items": 5})])
        refused_there = server.metric('loka_requests_total{outcome="queue_full",route="/v1/recommend"}')
    summary = summarize(samples)
    assert summary["refused"]["requests"] == refused_there == summary["statuses"]["429"] > 30
    assert summary["refused"]["without_retry_after"] == 0
    assert summary["faults"] == {"status 429": refused_there}
    assert 0 < summary["refused"]["latency_ms"]["p50"] < summary["latency_ms"]["p50"]


def test_figures_are_of_the_counted_part() -> None:
    rows = np.zeros(1001, SAMPLE)
    rows["scheduled"] = np.arange(-1, 1000) / 100.0
    rows["sent"] = rows["scheduled"] + 0.001
    rows["done"] = rows["scheduled"] + np.arange(0, 1001) / 1000.0  # 1 ms, 2 ms, ... 1,000 ms; the warm-up's is 0
    rows["status"], rows["right"] = 200, True
    rows["status"][1000], rows["right"][1000] = 503, False
    samples = Samples(Load("http://127.0.0.1:1", rate=100.0, seconds=10.0), [Template(b"{}")], 0.0, rows)
    summary = summarize(samples, bound_ms=500.0)
    assert summary["requests"] == 1000 and summary["right"] == 999
    assert summary["goodput"] == {"bound_ms": 500.0, "per_s": 50.0, "share": 0.5}
    found = summary["latency_ms"]
    # Of 1..999 ms: each percentile is the least value that was seen with at least that share at or below it.
    assert (found["p50"], found["p90"], found["p99"], found["max"]) == (500.0, 900.0, 990.0, 999.0)
    assert found["p99.9"] == 999.0
    assert summary["refused"]["without_retry_after"] == 1
    assert summary["refused"]["latency_ms"]["p50"] == 999.0
    assert summary["generator_lag_ms"]["max"] == 1.0


def open_loop(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.open_loop", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_command_line(server: RunningServer, histories: Path, tmp_path: Path) -> None:
    load = ["--url", server.url, "--rate", "40", "--seconds", "2", "--warmup", "0.5", "--beams", "12,16"]
    files = ["--out", str(tmp_path / "load.json"), "--plot", str(tmp_path / "load.svg")]
    result = open_loop(*load, *files, "--histories", str(histories), "--bound-ms", "5000")
    assert result.returncode == 0, result.stderr
    written: dict[str, Any] = json.loads((tmp_path / "load.json").read_text())
    assert written["statuses"] == {"200": written["requests"]} and written["requests"] > 40
    assert sum(second["due"] for second in written["timeline"] if second["second"] >= 0) == written["requests"]
    assert ElementTree.parse(tmp_path / "load.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"

    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text('{"history": ["item-1"], "num_items": 5, "exclude_history": true}\n{"history": 7}\n')
    result = open_loop(*load[:6], "--warmup", "0", "--bodies", str(bodies))
    assert result.returncode == 1  # half of the bodies are malformed
    found = json.loads(result.stdout)
    assert set(found["statuses"]) == {"200", "422"} and found["faults"] == {"status 422": found["statuses"]["422"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0", "--bodies", __file__], "--rate: expected a number of requests a second"),
        (["--rate", "5", "--bodies", __file__], "test_open_loop.py:1: expected a JSON object"),
        (["--rate", "5", "--histories", __file__, "--bound-ms", "x"], "a number of milliseconds above 0, got 'x'"),
        (["--rate", "5", "--bodies", "{bodies}", "--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text('{"history": []}\n')
    result = open_loop(*(argument.replace("{bodies}", str(bodies)) for argument in arguments))
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert message in result.stderr
