"""One process of an open-loop load: sends each request at its time, whatever became of those before."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from loadtest.answers import fault_of
from loadtest.bodies import Template
from loadtest.samples import SAMPLE

KEEP_ALIVE_SECONDS = 2.0
"""Less than the server's: a connection that it closes just then would look like a lost request."""


@dataclass(frozen=True)
class Share:
    """What one process sends.

    Attributes:
        url: of POST /v1/recommend.
        arrivals: float64 [n], seconds from the start, ascending.
        chosen: int32 [n], which template each is.
        give_up_seconds: after which a request counts as not answered.
    """

    url: str
    headers: tuple[tuple[str, str], ...]
    templates: tuple[Template, ...]
    arrivals: NDArray[np.float64]
    chosen: NDArray[np.int32]
    give_up_seconds: float


@dataclass
class Sent:
    """What came of it: samples in the order of arrival, and how often each fault was seen."""

    samples: NDArray[np.void]
    faults: Counter[str]


def send(share: Share, start: float) -> Sent:
    """Send a share; `start` is `time.monotonic()` of its second 0."""
    import uvloop

    return uvloop.run(_send(share, start))


def open_session(headers: Sequence[tuple[str, str]], give_up_seconds: float) -> aiohttp.ClientSession:
    """As many connections as it takes, without cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        headers={"Content-Type": "application/json", **dict(headers)},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=give_up_seconds),
    )


async def _send(share: Share, start: float) -> Sent:
    sent = Sent(np.zeros(len(share.arrivals), SAMPLE), Counter())
    sent.samples["scheduled"], sent.samples["template"] = share.arrivals, share.chosen
    async with open_session(share.headers, share.give_up_seconds) as session:
        under_way: set[asyncio.Task[None]] = set()
        for index, arrival in enumerate(share.arrivals.tolist()):
            wait = start + arrival - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            elif index % 16 == 0:
                await asyncio.sleep(0)  # behind time: still let answers be read
            template = share.templates[share.chosen[index]]
            sample = sent.samples[index]
            task = asyncio.create_task(send_one(session, share.url, template, start, sample, sent.faults))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
    return sent


async def send_one(
    session: aiohttp.ClientSession, url: str, template: Template, start: float, sample: np.void, faults: Counter[str]
) -> None:
    """Send one request, and write what came of it into its sample."""
    sample["sent"] = time.monotonic() - start
    fault: str | None
    try:
        async with session.post(url, data=template.body, headers=template.headers) as response:
            content = await response.read()
            sample["done"] = time.monotonic() - start
            sample["status"] = response.status
            sample["retry_after"] = "Retry-After" in response.headers
        fault = _fault(response.status, content, template.num_items)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        sample["done"] = time.monotonic() - start
        fault = f"no answer: {type(error).__name__}"
    sample["right"] = fault is None
    if fault is not None:
        faults[fault] += 1


def _fault(status: int, content: bytes, num_items: int) -> str | None:
    if status != 200:
        return f"status {status}"
    if not num_items:
        return None
    try:
        return fault_of(orjson.loads(content), num_items)
    except (ValueError, TypeError, KeyError, AttributeError):
        return "no recommendation"


def shares(
    url: str,
    headers: Sequence[tuple[str, str]],
    templates: Sequence[Template],
    arrivals: NDArray[np.float64],
    chosen: NDArray[np.int32],
    processes: int,
    give_up_seconds: float,
) -> list[Share]:
    """Deal the arrivals out to processes in turn; together they are the same arrivals."""
    return [
        Share(
            url, tuple(headers), tuple(templates), arrivals[part::processes], chosen[part::processes], give_up_seconds
        )
        for part in range(processes)
    ]
