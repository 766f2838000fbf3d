"""Hostile clients: slow ones, huge bodies, malformed and doubled JSON, compressed bombs; what each of them got.

python -m loadtest.hostile --url http://127.0.0.1:8000 [--slow 500] [--repeat 50] [--body-bytes 1000000000]

Send it only to servers of your own. Exit code 1 if something was accepted, or not refused as it should be.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadtest.open_loop import require_server
from loka_serve.command_line import CommandParser, positive, run_command_line

CLOSED = 0  # in place of a status: the server closed the connection without a word
NOT_CUT_OFF = -1
CHUNK = b" " * 65536
TRICKLE_SECONDS = 1.0
UNREAD = "answers not read"
UNREAD_SHARE = 10  # one such client for ten other slow ones: each asks often, and a flood is not meant
PIPELINED = 1000
UNREAD_ANSWERS = 60
PATIENCE_SECONDS = 60.0
AT_ONCE = 50


@dataclass(frozen=True)
class Attack:
    """One kind of hostile request.

    Attributes:
        refusals: statuses that are right; `CLOSED` where closing the connection without an answer is, too.
    """

    name: str
    refusals: frozenset[int]
    run: Callable[[], Awaitable[int]]


@dataclass(frozen=True)
class Outcome:
    """What came of all tries of an attack."""

    statuses: dict[int, int]
    seconds: float
    longest: float
    refused: bool


class Target:
    """Where it goes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80

    async def exchange(self, send: Callable[[asyncio.StreamWriter], Awaitable[None]], to_the_end: bool = False) -> int:
        """The status of the answer to what `send` writes, which is ended by the answer if it does not end by itself.

        Args:
            to_the_end: read on until the server closes the connection, which is then the outcome.
        """
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), PATIENCE_SECONDS)
        except OSError:
            return CLOSED
        sending = asyncio.ensure_future(send(writer))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                line = await reader.readline()
                while to_the_end and line:
                    line = await reader.read(1 << 16)
            return int(line.split()[1]) if line.startswith(b"HTTP/") else CLOSED
        except (ConnectionError, IndexError, ValueError):
            return CLOSED
        except TimeoutError:
            return NOT_CUT_OFF
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending
            writer.transport.abort()  # closing would wait for what the server does not take

    def head(self, length: int | None, *headers: str) -> bytes:
        """Of POST /v1/recommend; without a length the body is chunked."""
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        lines = ["POST /v1/recommend HTTP/1.1", f"Host: {self.host}", framing, *headers]
        return "\r\n".join([*lines, "", ""]).encode()

    async def post(self, body: bytes, *headers: str) -> int:
        """A whole body at once."""

        async def send(writer: asyncio.StreamWriter) -> None:
            writer.write(self.head(len(body), *headers) + body)
            await writer.drain()

        return await self.exchange(send)

    async def trickle(self, begin: bytes) -> int:
        """A byte now and then after a beginning that promises more."""

        async def send(writer: asyncio.StreamWriter) -> None:
            writer.write(begin)
            while True:
                await writer.drain()
                await asyncio.sleep(TRICKLE_SECONDS)
                writer.write(b"x")

        return await self.exchange(send)

    async def flood(self, size: int, chunked: bool) -> int:
        """A body of so many bytes, as fast as it is taken."""

        async def send(writer: asyncio.StreamWriter) -> None:
            writer.write(self.head(None if chunked else size))
            for _ in range(-(-size // len(CHUNK))):
                writer.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK) if chunked else CHUNK)
                await writer.drain()

        return await self.exchange(send)

    async def ask_and_not_read(self) -> int:
        """Ask for more than any buffer holds, and take none of it."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (self.host, self.port))
        _, writer = await asyncio.open_connection(sock=connection, limit=1024)
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * UNREAD_ANSWERS)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not writer.transport.is_closing():
                    await writer.drain()
                    await asyncio.sleep(TRICKLE_SECONDS)
                    writer.write(b"\r\n")  # means nothing, but finds out whether the other end is still there
            return CLOSED
        except ConnectionError:
            return CLOSED
        except TimeoutError:
            return NOT_CUT_OFF
        finally:
            writer.transport.abort()

    async def pipeline(self) -> int:
        """More requests at once than anybody sends; the status of the first answer does not count."""

        async def send(writer: asyncio.StreamWriter) -> None:
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" * PIPELINED)
            await writer.drain()

        return await self.exchange(send, to_the_end=True)

    async def endless_header(self) -> int:
        """A header that does not end."""

        async def send(writer: asyncio.StreamWriter) -> None:
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: ")
            while True:
                writer.write(CHUNK)
                await writer.drain()

        return await self.exchange(send)


def malformed_bodies() -> dict[str, bytes]:
    """Bodies that are small, and wrong."""
    deep = b"[" * 100_000 + b"]" * 100_000
    return {
        "deep JSON": b'{"history": %s}' % deep,
        "deep JSON in a batch's element": b'{"history": [], "filter": {"kind": %s}}' % deep,
        "huge integer": b'{"history_sids": [[1, 2, %s]]}' % (b"9" * 100_000),
        "huge number of items": b'{"history": [], "num_items": 1%s}' % (b"0" * 5000),
        "NaN": b'{"history": [], "timeout_ms": NaN}',
        "infinity": b'{"history": [], "timeout_ms": 1e999}',
        "bad UTF-8": b'{"history": ["\xff\xfe"]}',
        "lone surrogate": b'{"history": ["\\ud800"]}',
        "key twice": b'{"history": ["a"], "history": ["b"]}',
        "escaped key twice": b'{"history": ["a"], "histor\\u0079": ["b"]}',
        "truncated": b'{"history": ["a"',
        "unknown field": b'{"history": [], "%s": 1}' % (b"k" * 100_000),
    }


def attacks(url: str, body_bytes: int) -> list[Attack]:
    """Everything that is over in a moment; slow clients come apart."""
    target = Target(url)
    bomb = gzip.compress(bytes(64 << 20))  # 64 MiB in 64 KiB

    def attack(name: str, run: Callable[[], Awaitable[int]], *refusals: int) -> Attack:
        return Attack(name, frozenset(refusals), run)

    def post(body: bytes, *headers: str) -> Callable[[], Awaitable[int]]:
        return lambda: target.post(body, *headers)

    return [
        *(attack(name, post(body), 422) for name, body in malformed_bodies().items()),
        attack("gzip bomb", post(bomb, "Content-Encoding: gzip"), 415),
        # The answer may be lost where the server closes while the client still sends.
        attack("huge body, its size declared", lambda: target.flood(body_bytes, False), 413, CLOSED),
        attack("huge body, chunked", lambda: target.flood(body_bytes, True), 413, CLOSED),
        attack("1,000 requests in one pipeline", target.pipeline, CLOSED),
        attack("endless header", target.endless_header, 431, CLOSED),
    ]


def slow_attacks(url: str) -> list[Attack]:
    """Clients that would take for ever, or never take their answers."""
    target = Target(url)
    head = b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: "
    return [
        Attack("slow heads", frozenset({408}), lambda: target.trickle(head)),
        # 429: there was no place in the queue to wait for it.
        Attack(UNREAD, frozenset({CLOSED}), target.ask_and_not_read),
        Attack("slow bodies", frozenset({408, 429}), lambda: target.trickle(target.head(1000) + b"{")),
    ]


async def launch(attack: Attack, times: int, at_once: int) -> Outcome:
    """Try so many times, so many at once."""
    free = asyncio.Semaphore(at_once)
    durations: list[float] = []

    async def once() -> int:
        async with free:
            started = time.monotonic()
            status = await attack.run()
            durations.append(time.monotonic() - started)
            return status

    started = time.monotonic()
    statuses = Counter(await asyncio.gather(*(once() for _ in range(times))))
    return Outcome(dict(statuses), time.monotonic() - started, max(durations), set(statuses) <= attack.refusals)


async def assail(url: str, slow: int, repeat: int, body_bytes: int, left_out: Sequence[str] = ()) -> dict[str, Outcome]:
    """All attacks: slow clients, all at once, and beside them one kind of the others after another."""
    counts = {
        UNREAD: max(1, slow // 10)
    }  # each is answered 60 times: more of them would be a flood, which is not meant
    waiting = {
        attack.name: asyncio.ensure_future(launch(attack, counts.get(attack.name, slow), slow))
        for attack in slow_attacks(url)
        if attack.name not in left_out
    }
    outcomes = {}
    for attack in attacks(url, body_bytes):
        times = repeat if body_bytes < 1 << 20 or not attack.name.startswith("huge body") else min(repeat, 4)
        outcomes[attack.name] = await launch(attack, times, AT_ONCE)
    return outcomes | {name: await launched for name, launched in waiting.items()}


def shown(outcomes: dict[str, Outcome]) -> Sequence[str]:
    """One line on each."""
    words = {CLOSED: "closed", NOT_CUT_OFF: "not cut off"}
    return [
        f"{'refused' if outcome.refused else 'NOT REFUSED':11} {name}: "
        + ", ".join(f"{words.get(status, status)} x {count}" for status, count in sorted(outcome.statuses.items()))
        + f", longest {outcome.longest:.2f} s"
        for name, outcome in outcomes.items()
    ]


def main() -> None:
    """Run all and show what came of it."""
    parser = CommandParser(__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument(
        "--slow",
        type=positive,
        default=500,
        help="slow clients of each kind (default: 500)",
    )
    parser.add_argument("--repeat", type=positive, default=50, help="tries of all else (default: 50)")
    parser.add_argument("--body-bytes", type=positive, default=10**9, help="of a huge body (default: 1 GB)")
    options = parser.parse_args()
    require_server(options.url)
    outcomes = asyncio.run(assail(options.url, options.slow, options.repeat, options.body_bytes))
    print("\n".join(shown(outcomes)))
    raise SystemExit(0 if all(outcome.refused for outcome in outcomes.values()) else 1)


if __name__ == "__main__":
    run_command_line(main)
