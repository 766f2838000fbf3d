"""The engine process is killed again and again, or hangs, under load: every request is answered once."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.reliability.case import Case, Figure, Setting
from benchmarks.reliability.servers import scripted_requests, scripted_server
from loadtest.open_loop import Load, RunningLoad
from loadtest.summary import summarize
from tests.server.processes import RunningServer
from tests.server.scripted_engine import HANG, command

RATE, BATCH_SECONDS = 40.0, 0.02
KILLS, QUICK_KILLS = 20, 1
PAUSE_SECONDS = 1.5
READY_SECONDS, QUICK_READY_SECONDS = 5.0, 10.0
WATCHDOG_SECONDS = 1.0


def ready_again(server: RunningServer, before: int, seconds: float) -> float:
    """Seconds until another engine process takes requests."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if server.client.get("/health/ready").status_code == 200:
            try:
                if server.engine_pid() != before:
                    return time.monotonic() - started
            except AssertionError:
                pass  # between two processes
        time.sleep(0.01)
    raise AssertionError(f"not ready again within {seconds:g} s")


def kills(setting: Setting) -> list[Figure]:
    """SIGKILL to the engine while requests come; the API process stays."""
    count = QUICK_KILLS if setting.quick else KILLS
    most = QUICK_READY_SECONDS if setting.quick else READY_SECONDS
    with scripted_server(setting, engine=["--seconds", str(BATCH_SECONDS)]) as server:
        api = server.process.pid
        load = RunningLoad(Load(server.url, RATE, count * (PAUSE_SECONDS + 1.5) + 2), scripted_requests())
        times = []
        for _ in range(count):
            time.sleep(PAUSE_SECONDS)
            pid = server.engine_pid()
            os.kill(pid, signal.SIGKILL)
            times.append(ready_again(server, pid, 3 * most))
        summary = summarize(load.wait())
        alive = server.process.poll() is None and server.process.pid == api
    return [
        Figure("kills", count),
        Figure("ready again, longest", max(times), "s", most=most),
        *_answers(summary),
        Figure("API processes that ended", 0 if alive else 1, most=0),
    ]


def hangs(setting: Setting) -> list[Figure]:
    """One request makes the engine hang; the watchdog replaces it."""
    flags = ["--engine-batch-timeout-s", str(WATCHDOG_SECONDS)]
    most = WATCHDOG_SECONDS + (QUICK_READY_SECONDS if setting.quick else READY_SECONDS)
    with scripted_server(setting, *flags, engine=["--seconds", str(BATCH_SECONDS)]) as server:
        load = RunningLoad(Load(server.url, RATE, 6.0 if setting.quick else 20.0), scripted_requests())
        time.sleep(1.0)
        pid = server.engine_pid()
        started = time.monotonic()
        status = server.recommend(history_sids=command(HANG)).status_code
        ready_again(server, pid, 3 * most)
        seconds = time.monotonic() - started
        summary = summarize(load.wait())
    return [
        Figure("status of the one that hung", status, least=503, most=503),
        Figure("detected and ready again", seconds, "s", most=most),
        *_answers(summary),
    ]


def _answers(summary: dict[str, object]) -> list[Figure]:
    statuses = summary["statuses"]
    assert isinstance(statuses, dict)
    other = sum(count for status, count in statuses.items() if status not in ("200", "503", "504"))
    return [
        Figure("requests", sum(statuses.values())),
        Figure("answered rightly", statuses.get("200", 0)),
        Figure("told to come back (503)", statuses.get("503", 0)),
        Figure("without an answer, or with another", other, most=0),
    ]


CASES = (
    Case("engine_kills", "engine killed (-9) 20 times under load", kills),
    Case("engine_hang", "engine hangs under load", hangs, quick=False),
)
