"""Closed loop: clients that send one request after the other. Measures capacity, not latency under a given load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from loadtest.bodies import Template
from loadtest.samples import SAMPLE, Load, Samples
from loadtest.sending import Sent, open_session, send_one
from loadtest.worker import Worker

CHUNK = 4096
START_SECONDS = END_SECONDS = 60.0


def run_closed(
    url: str,
    templates: Sequence[Template],
    clients: int,
    seconds: float,
    warmup_seconds: float = 0.0,
    give_up_seconds: float = 30.0,
    headers: Sequence[tuple[str, str]] = (),
    path: str = "/v1/recommend",
) -> Samples:
    """Drive `clients` at once from a process of their own; a request is scheduled when it is sent.

    The load's rate is how many a second were sent after the warm-up.
    """
    address = url.rstrip("/") + path
    arguments = (address, tuple(headers), tuple(templates), clients, warmup_seconds + seconds, give_up_seconds)
    worker = Worker(_work, *arguments)
    start: float = worker.hear(START_SECONDS)
    sent: Sent = worker.hear(warmup_seconds + seconds + give_up_seconds + END_SECONDS)
    worker.join()
    for field in ("scheduled", "sent", "done"):
        sent.samples[field] -= warmup_seconds
    rate = float((sent.samples["scheduled"] >= 0).sum()) / seconds
    load = Load(url, rate, seconds, warmup_seconds, 1, give_up_seconds, tuple(headers), path)
    rows = sent.samples[np.argsort(sent.samples["scheduled"])]
    return Samples(load, templates, start + warmup_seconds, rows, sent.faults)


def _work(pipe: Connection, *arguments: object) -> None:
    import uvloop

    start = time.monotonic()
    pipe.send(start)
    pipe.send(uvloop.run(_drive(start, *arguments)))


async def _drive(
    start: float,
    url: str,
    headers: tuple[tuple[str, str], ...],
    templates: tuple[Template, ...],
    clients: int,
    seconds: float,
    give_up_seconds: float,
) -> Sent:
    chunks = [np.zeros(CHUNK, SAMPLE)]
    used, faults = 0, Counter[str]()

    async def one_client() -> None:
        nonlocal used
        while time.monotonic() - start < seconds:
            place = used % CHUNK
            if used and place == 0:
                chunks.append(np.zeros(CHUNK, SAMPLE))
            sample = chunks[-1][place]
            sample["template"] = used % len(templates)
            used += 1
            sample["scheduled"] = time.monotonic() - start
            await send_one(session, url, templates[sample["template"]], start, sample, faults)
            if not sample["status"]:
                await asyncio.sleep(0.05)  # nobody there: no busy loop

    async with open_session(headers, give_up_seconds) as session:
        await asyncio.gather(*(one_client() for _ in range(clients)))
    return Sent(np.concatenate(chunks)[:used], faults)
