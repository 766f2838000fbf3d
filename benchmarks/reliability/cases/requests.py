"""Single requests that fail, are late or are abandoned, and those that share the engine with them."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.reliability.case import Case, Figure, Setting
from benchmarks.reliability.servers import scripted_server
from tests.server.processes import RunningServer
from tests.server.scripted_engine import NAN, SLOW, command

TRIES = 30
DEADLINE_MS = 150
QUICK_ONES = 15
MOST_LATE_MS = 50.0
CANCELLED = 'loka_requests_total{outcome="cancelled",route="/v1/recommend"}'


def late_ms(server: RunningServer, timeout_ms: int, status: int) -> float:
    """How long after its deadline a request with this status was answered."""
    started = time.monotonic()
    response = server.recommend(history=[], timeout_ms=timeout_ms)
    seconds = time.monotonic() - started
    if response.status_code != status:
        raise AssertionError(f"expected status {status}, got {response.status_code}: {response.text}")
    return 1e3 * seconds - (timeout_ms if status == 504 else 0)


def deadlines(setting: Setting) -> list[Figure]:
    """A batch of half a second runs: who is late, or finds no place, is told so before it ends."""
    late, refused = [], []
    flags = ["--max-batch", "1", "--max-queue", "1", "--engine-batch-timeout-s", "30"]
    with scripted_server(setting, *flags) as server, ThreadPoolExecutor(4) as pool:
        for _ in range(TRIES):
            for _ in range(QUICK_ONES):  # or the queue would know that there is no hope, and refuse at once
                server.recommend(history=[])
            slow = []
            for number in (1, 2):
                slow.append(pool.submit(server.recommend, history_sids=command(SLOW)))
                wait_for_metric(server, "loka_batches_in_flight", number)
            queued = pool.submit(late_ms, server, DEADLINE_MS, 504)
            wait_for_metric(server, "loka_queue_depth", 1)
            refused.append(late_ms(server, 1000, 429))
            late.append(queued.result())
            assert all(future.result().status_code == 200 for future in slow)
    return [
        Figure("answered after the deadline passed, longest", max(late), "ms", most=MOST_LATE_MS),
        Figure("refused by a full queue, longest", max(refused), "ms", most=MOST_LATE_MS),
    ]


def abandoned(setting: Setting) -> list[Figure]:
    """Clients leave, half of them in the queue and half in a batch; the next request is served."""
    with scripted_server(setting, "--max-batch", "1", engine=["--seconds", "0.05"]) as server:
        host, port = server.url.removeprefix("http://").split(":")
        freed = []
        for _ in range(TRIES):
            connections = [socket.create_connection((host, int(port))) for _ in range(4)]
            for connection in connections:
                body = b'{"history": [], "timeout_ms": 20000}'
                head = f"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
            wait_for_metric(server, "loka_queue_depth", 2)
            started = time.monotonic()
            for connection in connections:
                connection.close()
            wait_for_metric(server, "loka_queue_depth", 0)
            freed.append(1e3 * (time.monotonic() - started))
            wait_for_metric(server, "loka_batches_in_flight", 0)
        answered = server.recommend(history=[]).status_code
        cancelled = server.metric(CANCELLED)
    return [
        Figure("clients that left", 4 * TRIES),
        Figure("counted as such", cancelled, least=4 * TRIES, most=4 * TRIES),
        Figure("their places in the queue free after, longest", max(freed), "ms", most=50.0),
        Figure("status of the next request", answered, least=200, most=200),
    ]


def one_of_sixteen(setting: Setting) -> list[Figure]:
    """Fifteen good requests and one that is not, sent together into batches of sixteen."""
    kinds = {"nan": {"history_sids": command(NAN)}, "malformed": {"history": 7}, "oversize": {"history": ["x" * 600]}}
    expected = {"nan": 500, "malformed": 422, "oversize": 422}
    wrong, bad = 0, 0
    with (
        scripted_server(setting, "--max-batch", "16", "--max-delay-ms", "50") as server,
        ThreadPoolExecutor(16) as pool,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        for _ in range(TRIES):
            for kind, body in kinds.items():
                bodies = [{"history": [f"item-{number}"], "num_items": 5} for number in range(15)]
                bodies.insert(7, body)
                answers = list(pool.map(lambda body: client.post("/v1/recommend", json=body), bodies))
                bad += answers.pop(7).status_code != expected[kind]
                wrong += sum(answer.status_code != 200 or len(answer.json()["items"]) != 5 for answer in answers)
    return [
        Figure("good requests", 45 * TRIES),
        Figure("not answered rightly", wrong, most=0),
        Figure("bad ones that were not refused as they should", bad, most=0),
    ]


def wait_for_metric(server: RunningServer, name: str, value: float, seconds: float = 10.0) -> None:
    """Raises AssertionError if it does not come to that."""
    deadline = time.monotonic() + seconds
    while server.metric(name) != value:
        if time.monotonic() > deadline:
            raise AssertionError(f"{name} is {server.metric(name)}, expected {value}")
        time.sleep(0.002)


CASES = (
    Case("deadlines", "queue full, or deadline passed, while a batch runs", deadlines, quick=False),
    Case("abandoned", "clients leave, in the queue and in the batch", abandoned, quick=False),
    Case("one_of_sixteen", "one bad request among 16 of a batch", one_of_sixteen, quick=False),
)
