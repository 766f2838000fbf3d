"""The hostile clients' own judgement: what counts as refused. That a server refuses is a case of the benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import cycle

import pytest

from loadtest import hostile
from loadtest.hostile import CLOSED, NOT_CUT_OFF, Attack, Target, attacks, launch, malformed_bodies, shown

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server that does this with each connection."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


def status_of(answer: Answer, call: Callable[[Target], Awaitable[int]]) -> int:
    async def run() -> int:
        async with serving(answer) as url:
            return await asyncio.wait_for(call(Target(url)), 20)

    return asyncio.run(run())


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 422 Unprocessable\r\nContent-Length: 0\r\n\r\n")


async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.CancelledError, ConnectionError):
        await asyncio.sleep(10)


def test_statuses_are_read_and_a_closed_connection_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "PATIENCE_SECONDS", 0.3)
    assert status_of(refuse, lambda target: target.post(b"{}")) == 422
    assert status_of(refuse, lambda target: target.flood(10**9, True)) == 422
    assert status_of(close, lambda target: target.post(b"{}")) == CLOSED
    assert status_of(wait, lambda target: target.post(b"{}")) == NOT_CUT_OFF
    assert status_of(wait, lambda target: target.trickle(b"GET")) == NOT_CUT_OFF


@pytest.mark.parametrize(
    ("statuses", "refused"), [([422], True), ([422, 413], True), ([422, 200], False), ([500], False)]
)
def test_an_attack_is_refused_if_each_try_is(statuses: list[int], refused: bool) -> None:
    left = cycle(statuses)

    async def attempt() -> int:
        return next(left)

    outcome = asyncio.run(launch(Attack("a", frozenset({422, 413}), attempt), 4, 2))
    assert outcome.refused is refused
    assert sum(outcome.statuses.values()) == 4
    (line,) = shown({"a": outcome})
    assert line.startswith("refused " if refused else "NOT REFUSED ")


def test_no_more_are_under_way_than_told() -> None:
    under_way, most = 0, 0

    async def attempt() -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return 422

    asyncio.run(launch(Attack("a", frozenset({422}), attempt), 20, 3))
    assert most == 3


def test_all_that_was_promised_is_sent() -> None:
    names = {attack.name for attack in attacks("http://127.0.0.1:1", 10)}
    assert {"deep JSON", "huge integer", "NaN", "bad UTF-8", "key twice", "gzip bomb", "huge body, chunked"} <= names
    assert set(malformed_bodies()) < names
