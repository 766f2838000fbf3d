"""Three times what the server can do: it answers as many as before, and tells the others so at once."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.reliability.case import Case, Figure, Setting
from benchmarks.reliability.servers import scripted_requests, scripted_server
from loadtest.bodies import Template, template
from loadtest.closed_loop import run_closed
from loadtest.open_loop import Load, run
from loadtest.summary import summarize

BATCH, BATCH_SECONDS = 8, 0.04
BOUND_MS = 400.0
SECONDS, QUICK_SECONDS = 60.0, 2.0
REFUSAL_MS, QUICK_REFUSAL_MS = 20.0, 1000.0  # a test's machine does other things, too


def with_deadline(requests: list[Template]) -> list[Template]:
    """The same requests, each with the bound as its deadline."""
    return [
        template({"history": [f"item-{user}", "item-7"], "num_items": one.num_items, "timeout_ms": BOUND_MS})
        for user, one in enumerate(requests)
    ]


def overload(setting: Setting) -> list[Figure]:
    """Open loops at once and three times the rate that a closed loop reached."""
    seconds = QUICK_SECONDS if setting.quick else SECONDS
    requests = with_deadline(scripted_requests())
    flags = ["--max-batch", str(BATCH)]
    with scripted_server(setting, *flags, engine=["--seconds", str(BATCH_SECONDS)]) as server:
        closed = run_closed(server.url, requests, 3 * BATCH, seconds / 3, warmup_seconds=1.0)
        capacity = summarize(closed, BOUND_MS)["goodput"]["per_s"]
        load = Load(server.url, capacity, seconds, 2.0)
        once = summarize(run(load, requests), BOUND_MS)
        thrice = summarize(run(replace(load, rate=3 * capacity, processes=2), requests), BOUND_MS)
    refused = thrice["refused"]
    return [
        Figure("capacity", capacity, "req/s"),
        Figure("goodput at 1x", once["goodput"]["per_s"], "req/s"),
        Figure(
            "goodput at 3x, of that at 1x",
            100 * thrice["goodput"]["per_s"] / once["goodput"]["per_s"],
            "%",
            least=50 if setting.quick else 95,
        ),
        Figure("admitted, p99", thrice["latency_ms"]["p99"], "ms", most=BOUND_MS * (3 if setting.quick else 1)),
        Figure("refused", refused["requests"]),
        Figure("refused without Retry-After", refused["without_retry_after"], most=0),
        Figure(
            "refusal, p99", refused["latency_ms"]["p99"], "ms", most=QUICK_REFUSAL_MS if setting.quick else REFUSAL_MS
        ),
        Figure("answers neither right nor 429, 503, 504", _odd(thrice), most=0),
    ]


def _odd(summary: dict[str, object]) -> int:
    statuses = summary["statuses"]
    assert isinstance(statuses, dict)
    return sum(count for status, count in statuses.items() if status not in ("200", "429", "503", "504"))


CASES = (Case("overload", "3x capacity for 60 s", overload),)
