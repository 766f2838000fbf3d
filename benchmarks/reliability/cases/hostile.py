"""Hostile clients beside well-behaved ones, and a scanner."""

from __future__ import annotations

import asyncio

import httpx

from benchmarks.reliability.case import Case, Figure, Setting
from benchmarks.reliability.cases.soak import Watch
from benchmarks.reliability.servers import scripted_requests, scripted_server
from loadtest.hostile import UNREAD, assail
from loadtest.open_loop import RunningLoad
from loadtest.samples import Load
from loadtest.summary import percentiles_ms

RATE, ENGINE_SECONDS = 50.0, "0.005"
ATTACK_SECONDS, QUICK_ATTACK_SECONDS = 45.0, 11.0  # until the last slow client is cut off
SLOW, QUICK_SLOW = 500, 100
REPEAT, QUICK_REPEAT = 50, 2
BODY_BYTES, QUICK_BODY_BYTES = 10**9, 10**8
MOST_MEMORY, MOST_P99_MS, QUICK_P99_MS = 200.0, 250.0, 5000.0
MOST_SECONDS_OF_A_SLOW_CLIENT = 15.0  # ten, and room for a busy machine
MOST_SECONDS_UNREAD = 45.0
PATHS, QUICK_PATHS = 10_000, 500
MEMORY_SECONDS = 0.1
SCANNED = ("/{}.php", "/admin/{}", "/v1/{}", "/v1/recommend/{}", "/v2/models/{}", "/v2/models/{}/infer", "/{}?q={}")


def hostile_clients(setting: Setting) -> list[Figure]:
    """All of `loadtest.hostile` against a server that is asked by others all the while."""
    seconds = QUICK_ATTACK_SECONDS if setting.quick else ATTACK_SECONDS
    slow, repeat = (QUICK_SLOW, QUICK_REPEAT) if setting.quick else (SLOW, REPEAT)
    body_bytes = QUICK_BODY_BYTES if setting.quick else BODY_BYTES
    with scripted_server(setting, engine=["--seconds", ENGINE_SECONDS]) as server:
        calm = RunningLoad(Load(server.url, RATE, 3.0), scripted_requests()).wait()
        watch = Watch(server.process.pid, MEMORY_SECONDS)
        load = RunningLoad(Load(server.url, RATE, seconds), scripted_requests())
        left_out = [UNREAD] if setting.quick else []  # the system takes half a minute to cut these off
        outcomes = asyncio.run(assail(server.url, slow, repeat, body_bytes, left_out))
        samples = load.wait()
        resident = watch.stop()[:, 1]
        restarts = server.metric("loka_engine_restarts_total")
        left = server.client.get("/health/ready").status_code
    served = percentiles_ms(samples.latency[samples.rows["right"]])
    before = percentiles_ms(calm.latency[calm.rows["right"]])
    return [
        Figure("hostile requests", sum(sum(outcome.statuses.values()) for outcome in outcomes.values())),
        Figure("kinds", len(outcomes)),
        Figure("kinds not refused", sum(not outcome.refused for outcome in outcomes.values()), most=0),
        Figure(
            "longest hold of a slow client",
            max(outcomes[name].longest for name in ("slow heads", "slow bodies")),
            "s",
            most=MOST_SECONDS_OF_A_SLOW_CLIENT,
        ),
        Figure(
            "of one that does not read",
            outcomes[UNREAD].longest if UNREAD in outcomes else 0.0,
            "s",
            most=MOST_SECONDS_UNREAD,
        ),
        Figure("memory added", float(resident.max() - resident[0]), "MiB", most=MOST_MEMORY),
        Figure("others' requests", len(samples.rows)),
        Figure("of these not answered rightly", int((~samples.rows["right"]).sum()), most=0),
        Figure("their p99 before", before["p99"], "ms"),
        Figure("their p99 meanwhile", served["p99"], "ms", most=QUICK_P99_MS if setting.quick else MOST_P99_MS),
        Figure("restarts of the engine", restarts, most=0),
        Figure("ready afterwards", int(left == httpx.codes.OK), least=1),
    ]


def scanner(setting: Setting) -> list[Figure]:
    """Paths that nobody else asks for; the metrics have as many series as before."""
    count = QUICK_PATHS if setting.quick else PATHS
    with scripted_server(setting) as server:
        urls = [SCANNED[index % len(SCANNED)].replace("{}", f"scan{index}") for index in range(count)]
        for url in urls[: len(SCANNED)]:  # what a path of each kind adds is there before it is counted
            _scan(server.client, url)
        _series(server.client)  # itself a path
        before = _series(server.client)
        for url in urls:
            _scan(server.client, url)
        after = _series(server.client)
    return [Figure("paths", count), Figure("new metric series", len(after - before), most=0)]


def _scan(client: httpx.Client, url: str) -> None:
    method = "POST" if url.endswith("infer") else "GET"
    assert client.request(method, url, headers={"user-agent": url, "x-request-id": url}).status_code in (404, 405)


def _series(client: httpx.Client) -> set[str]:
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


CASES = (
    Case("hostile_clients", "slowloris x 500, 1 GB bodies, malformed JSON, gzip bombs", hostile_clients),
    Case("scanner", "10,000 scanner paths", scanner),
)
