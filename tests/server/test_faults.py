"""What goes wrong goes wrong for as few as possible: engine death, hangs, deadlines, full queues, SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_engine import DIE, HANG, SLOW, SLOW_SECONDS, command

OUTCOME = 'loka_requests_total{{outcome="{}",route="/v1/recommend"}}'


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.fixture(scope="module")
def narrow(catalog_file: Path) -> Iterator[RunningServer]:
    """One request a batch, one place in the queue, and little patience."""
    flags = ("--max-batch", "1", "--max-queue", "1", "--engine-batch-timeout-s", "1.5", "--body-timeout-s", "0.3")
    with running(scripted_command(catalog_file, *flags)) as server:
        yield server


@contextmanager
def engine_busy(server: RunningServer) -> Iterator[None]:
    """Both places at the engine are taken by slow requests, which are answered in the end."""
    with ThreadPoolExecutor(2) as pool:
        slow = []
        for number in (1, 2):  # one after the other: together they would not both find a place in a short queue
            slow.append(pool.submit(server.recommend, history_sids=command(SLOW)))
            wait_for(lambda number=number: server.metric("loka_batches_in_flight") == number)
        yield
        assert [future.result().status_code for future in slow] == [200, 200]


def test_deadlines_in_the_queue_and_in_the_batch_are_504_at_once(narrow: RunningServer) -> None:
    before = narrow.metric(OUTCOME.format("deadline"))
    with engine_busy(narrow):
        started = time.monotonic()
        queued = narrow.recommend(history=[], timeout_ms=50)
        assert (queued.status_code, queued.json()["detail"]) == (504, "the deadline passed in the queue")
        assert time.monotonic() - started < SLOW_SECONDS  # not at the end of the batch
    computed = narrow.recommend(history_sids=command(SLOW), timeout_ms=100)
    assert computed.status_code == 504
    assert computed.json()["detail"] == "the deadline passed while the request was computed"
    assert narrow.recommend(history=[]).status_code == 200
    assert narrow.metric(OUTCOME.format("deadline")) == before + 2


def test_a_full_queue_is_429_before_the_body_is_sent(narrow: RunningServer) -> None:
    with engine_busy(narrow), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(narrow.recommend, history=[])
        wait_for(lambda: narrow.metric("loka_queue_depth") == 1)
        host, port = narrow.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=2) as connection:
            connection.sendall(b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
            answer = connection.recv(65536).decode()  # times out if the server waits for the body
        assert answer.startswith("HTTP/1.1 429 ")
        assert "\r\nretry-after: 1\r\n" in answer
        batch = narrow.client.post("/v1/recommend/batch", json={"requests": [{"history": []}]})
        assert batch.status_code == 429
        assert waiting.result().status_code == 200


def test_elements_of_a_batch_that_find_the_queue_full_are_429_alone(narrow: RunningServer) -> None:
    requests = [{"history_sids": command(SLOW)}] * 2 + [{"history": []}] * 3
    answers = narrow.client.post("/v1/recommend/batch", json={"requests": requests}).json()["responses"]
    # Two are in flight and one waits; the rest has no place.
    assert [answer.get("status", 200) for answer in answers] == [200, 200, 200, 429, 429]


def test_a_client_that_leaves_frees_its_place_and_stops_nothing(narrow: RunningServer) -> None:
    before = narrow.metric(OUTCOME.format("cancelled"))
    with engine_busy(narrow):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{narrow.url}/v1/recommend", json={"history": []}, timeout=0.1)
        wait_for(lambda: narrow.metric(OUTCOME.format("cancelled")) == before + 1)
        assert narrow.metric("loka_queue_depth") == 0
    with pytest.raises(httpx.ReadTimeout):  # now while it is computed
        httpx.post(f"{narrow.url}/v1/recommend", json={"history_sids": command(SLOW)}, timeout=0.1)
    wait_for(lambda: narrow.metric(OUTCOME.format("cancelled")) == before + 2)
    assert narrow.recommend(history=[]).status_code == 200
    assert narrow.metric("loka_requests_in_flight") == 1  # the request for the metrics itself


def test_a_body_that_does_not_arrive_is_408(narrow: RunningServer) -> None:
    host, port = narrow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b'POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"history')
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert narrow.recommend(history=[]).status_code == 200


def test_a_killed_engine_costs_only_what_it_held_and_is_replaced(narrow: RunningServer) -> None:
    engine, restarts = narrow.engine_pid(), narrow.metric("loka_engine_restarts_total")
    with ThreadPoolExecutor(1) as pool:
        in_flight = pool.submit(narrow.recommend, history_sids=command(HANG))
        wait_for(lambda: narrow.metric("loka_batches_in_flight") == 1)
        os.kill(engine, signal.SIGKILL)
        response = in_flight.result()
    assert (response.status_code, response.json()["type"]) == (503, "urn:loka-serve:problem:unavailable")
    narrow.wait_until_ready()
    assert narrow.recommend(history=[]).status_code == 200
    assert narrow.engine_pid() != engine
    assert narrow.process.poll() is None
    assert narrow.metric("loka_engine_restarts_total") == restarts + 1
    assert "the engine process ended with status -9" in narrow.log


def test_a_request_that_kills_its_engine_does_not_take_the_server_along(narrow: RunningServer) -> None:
    restarts = narrow.metric("loka_engine_restarts_total")
    for _ in range(3):
        assert narrow.recommend(history_sids=command(DIE)).status_code == 503
        assert narrow.client.get("/health/live").status_code == 200
        narrow.wait_until_ready()
        assert narrow.recommend(history=[], num_items=2).json()["items"][0]["item_id"] == "item-0"
    assert narrow.metric("loka_engine_restarts_total") == restarts + 3


def test_a_hanging_engine_is_killed_and_replaced(narrow: RunningServer) -> None:
    engine, started = narrow.engine_pid(), time.monotonic()
    assert narrow.recommend(history_sids=command(HANG)).status_code == 503
    assert 1.5 <= time.monotonic() - started < 4
    wait_for(lambda: not is_running(engine))
    narrow.wait_until_ready()
    assert "the engine hangs: no answer to a batch within 1.5 s" in narrow.log


def test_503_until_warmed_up(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, engine=["--seconds", "0.5"]), ready=False) as server:
        for response in (server.client.get("/health/ready"), server.recommend(history=[])):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert server.client.get("/health/live").status_code == 200
        assert server.metric("loka_engine_up") == 0
        server.wait_until_ready()
        assert server.recommend(history=[]).status_code == 200


def test_an_engine_that_hangs_at_the_start_is_tried_again(catalog_file: Path) -> None:
    flags = ("--engine-start-timeout-s", "1", "--engine-restarts", "50")
    with running(scripted_command(catalog_file, *flags, engine=["--seconds", "30"]), ready=False) as server:
        wait_for(lambda: server.metric("loka_engine_restarts_total") >= 1)
        assert server.recommend(history=[]).status_code == 503
        assert "not ready within 1 s" in server.log


def test_failed_starts_are_repeated_with_pauses_until_one_succeeds(catalog_file: Path, tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    with running(scripted_command(catalog_file, engine=["--fail-file", str(obstacle)]), ready=False) as server:
        wait_for(lambda: server.metric("loka_engine_restarts_total") >= 2)
        assert server.client.get("/health/ready").status_code == 503
        obstacle.unlink()
        server.wait_until_ready()


def test_too_many_failed_starts_end_the_server_with_status_1(catalog_file: Path, tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    engine = ["--fail-file", str(obstacle)]
    with running(scripted_command(catalog_file, "--engine-restarts", "1", engine=engine), ready=False) as server:
        assert server.process.wait(20) == 1
        assert "giving up: the engine failed 2 times in a row: the engine process ended with status 1" in server.log
        assert server.log.count("the engine process ended with status 1") == 2  # once for each start


def test_what_no_restart_would_mend_ends_the_server_with_status_2(catalog_file: Path) -> None:
    engine = ["--fail-start", "weights.safetensors: the checksum differs"]
    with running(scripted_command(catalog_file, engine=engine), ready=False) as server:
        assert server.process.wait(20) == 2
        assert "giving up: weights.safetensors: the checksum differs" in server.log
        assert server.log.count("the checksum differs") == 1
        assert "Traceback" not in server.log


def test_the_engine_ends_with_the_api_process(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file)) as server:
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not is_running(engine), 5)


def test_the_default_deadline_holds_for_requests_without_one(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, "--default-timeout-ms", "100")) as server:
        assert server.recommend(history_sids=command(SLOW)).status_code == 504
        assert server.recommend(history_sids=command(SLOW), timeout_ms=5000).status_code == 200


def hammer(server: RunningServer, statuses: list[int], lost: list[str], stop: threading.Event) -> None:
    """Ask again and again over one connection, until the server says no or listens no more."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        while not stop.is_set():
            try:
                response = client.post("/v1/recommend", json={"history": ["item-1"], "num_items": 3})
            except httpx.ConnectError:
                return  # never accepted, so not lost
            except httpx.HTTPError as error:
                lost.append(repr(error))
                return
            statuses.append(response.status_code)
            if response.status_code == 200:
                assert len(response.json()["items"]) == 3
            else:
                assert response.headers["retry-after"]
                return


def test_sigterm_under_load_loses_nothing(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, engine=["--seconds", "0.05"])) as server:
        statuses: list[int] = []
        lost: list[str] = []
        stop = threading.Event()
        slow = ThreadPoolExecutor(1).submit(server.recommend, history_sids=command(SLOW))
        clients = [threading.Thread(target=hammer, args=(server, statuses, lost, stop)) for _ in range(12)]
        for client in clients:
            client.start()
        wait_for(lambda: len(statuses) > 50)
        engine = server.engine_pid()
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 10
        for client in clients:
            client.join(5)
        stop.set()
        assert lost == []
        assert set(statuses) <= {200, 503}
        assert slow.result().status_code == 200
        assert not is_running(engine)


def test_a_drain_ends_though_new_connections_keep_coming(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, "--drain-timeout-s", "60")) as server:
        stop = threading.Event()

        def knock() -> None:
            while not stop.is_set():
                with contextlib.suppress(httpx.HTTPError):
                    httpx.post(f"{server.url}/v1/recommend", json={"history": []}, timeout=5)

        clients = [threading.Thread(target=knock) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0  # long before the drain timeout
        finally:
            stop.set()
            for client in clients:
                client.join(10)


def test_while_draining_ready_and_new_requests_are_503_and_the_old_one_is_answered(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, engine=["--seconds", "1"])) as server:
        pending = ThreadPoolExecutor(1).submit(server.recommend, history=[])
        wait_for(lambda: server.metric("loka_batches_in_flight") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("draining")
        ready = server.client.get("/health/ready")
        assert (ready.status_code, ready.headers["retry-after"], ready.headers["connection"]) == (503, "1", "close")
        assert server.recommend(history=[]).status_code == 503
        assert pending.result().status_code == 200
        assert server.process.wait(10) == 0


def test_a_second_sigterm_ends_at_once(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, "--engine-batch-timeout-s", "60")) as server:
        engine = server.engine_pid()
        pending = ThreadPoolExecutor(1).submit(server.recommend, history_sids=command(HANG), timeout_ms=60_000)
        wait_for(lambda: server.metric("loka_batches_in_flight") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("draining")
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 1
        with pytest.raises(httpx.HTTPError):
            pending.result()
        wait_for(lambda: not is_running(engine), 5)


def test_a_drain_is_bounded(catalog_file: Path) -> None:
    with running(scripted_command(catalog_file, "--drain-timeout-s", "0.5")) as server:
        pending = ThreadPoolExecutor(1).submit(server.recommend, history_sids=command(HANG), timeout_ms=60_000)
        wait_for(lambda: server.metric("loka_batches_in_flight") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert pending.result().status_code == 503
        assert "not answered within the drain timeout: 1" in server.log
