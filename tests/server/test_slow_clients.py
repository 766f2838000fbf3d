"""Slow clients hold neither the queue nor memory nor connections from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loka_serve.server.bodies import SMALL_BODY_BYTES, ReadingRoom, read_body
from loka_serve.server.problems import ProblemError
from tests.server.processes import RunningServer, running, scripted_command

SLOW_BODY = b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"


@pytest.fixture(scope="module")
def server(catalog_file: Path) -> Iterator[RunningServer]:
    flags = ("--max-queue", "8", "--body-timeout-s", "3", "--max-connections", "40")
    with running(scripted_command(catalog_file, *flags)) as server:
        yield server


@contextlib.contextmanager
def connections(server: RunningServer, count: int, begin: bytes) -> Iterator[list[socket.socket]]:
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection((host, int(port)), timeout=10)) for _ in range(count)]
        for connection in opened:
            connection.sendall(begin)
        yield opened


def test_slow_bodies_lose_their_places_in_the_queue_and_are_cut_off(server: RunningServer) -> None:
    with connections(server, 16, SLOW_BODY) as slow:
        deadline = time.monotonic() + 2.5  # well before their bodies time out
        while server.recommend(history=[]).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answers = [connection.recv(4096).split(b"\r\n")[0] for connection in slow]
    # Those that found a place read on without it until their time was up; the others were refused at once.
    assert sorted(set(answers)) == [b"HTTP/1.1 408 Request Timeout", b"HTTP/1.1 429 Too Many Requests"]
    assert server.metric("loka_queue_depth") == 0


def test_connections_beyond_the_limit_are_closed_and_the_others_are_served(server: RunningServer) -> None:
    assert server.recommend(history=[]).status_code == 200
    with connections(server, 60, b"") as opened:
        deadline = time.monotonic() + 10
        closed: set[socket.socket] = set()
        for connection in opened:
            connection.settimeout(0.05)
        while len(closed) < 20 and time.monotonic() < deadline:
            for connection in set(opened) - closed:
                with contextlib.suppress(TimeoutError):
                    with contextlib.suppress(ConnectionResetError):
                        assert connection.recv(1) == b""
                    closed.add(connection)
        assert 20 <= len(closed) <= 21  # one is the client's own, below
        assert server.recommend(history=[]).status_code == 200  # on the connection that it has kept
    server.client.close()
    server.client = httpx.Client(base_url=server.url, timeout=30)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            assert server.recommend(history=[]).status_code == 200
            return
    raise AssertionError("no connection was free again")


class Stream:
    """A request whose body comes in chunks when it is told to."""

    def __init__(self, chunks: list[bytes], gate: asyncio.Event) -> None:
        self.headers: dict[str, str] = {}
        self.chunks, self.gate = chunks, gate

    async def stream(self) -> Any:
        for chunk in self.chunks:
            yield chunk
        await self.gate.wait()


def test_large_bodies_share_a_room_and_small_ones_need_none() -> None:
    async def test() -> None:
        room, gate = ReadingRoom(2 * SMALL_BODY_BYTES), asyncio.Event()
        chunk = bytes(SMALL_BODY_BYTES)

        def read(chunks: list[bytes]) -> asyncio.Task[bytes]:
            return asyncio.create_task(read_body(Stream(chunks, gate), 1 << 20, 60, room))  # type: ignore[arg-type]

        first, second = read([chunk, chunk]), read([chunk, chunk])
        small = [read([chunk]) for _ in range(100)]
        await asyncio.sleep(0.01)
        assert room.taken == 2 * SMALL_BODY_BYTES
        with pytest.raises(ProblemError, match="too many large bodies are being read") as caught:
            await read([chunk, chunk])
        assert (caught.value.kind.status, caught.value.headers()) == (429, {"Retry-After": "1"})
        gate.set()
        bodies = await asyncio.gather(first, second, *small)
        assert [len(body) for body in bodies] == [len(chunk) * 2] * 2 + [len(chunk)] * 100
        assert room.taken == 0
        with pytest.raises(ProblemError, match="too many large"):
            await read([chunk, chunk, chunk, chunk])
        assert room.taken == 0  # a refused one gives back what it took

    asyncio.run(test())
