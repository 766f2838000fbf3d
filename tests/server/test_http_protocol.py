"""The head of a request is bounded: 431 to one that is too large, 408 to one that does not end."""

from __future__ import annotations

import socket
import time

import pytest

from loka_serve.server.http_protocol import LARGEST_HEAD_BYTES, LONGEST_PIPELINE
from tests.server.processes import RunningServer

START = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
END = b"Connection: close\r\n\r\n"


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def exchange(server: RunningServer, *parts: bytes) -> bytes:
    """Send until the server closes; what it answered."""
    received = b""
    with connect(server) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:
            pass  # closed while there was more to send
    return received


def test_a_head_of_usual_size_is_accepted(scripted: RunningServer) -> None:
    headers = b"".join(b"X-%d: %s\r\n" % (index, b"v" * 1000) for index in range(24))
    assert exchange(scripted, START + headers + END).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        START + b"X: %s\r\n" % (b"v" * LARGEST_HEAD_BYTES),
        START + b"".join(b"X-%d: %s\r\n" % (index, b"v" * 1000) for index in range(40)),
        START + b"X:\r\n" * LARGEST_HEAD_BYTES,
        b"GET /health/live?%s HTTP/1.1\r\nHost: x\r\n" % (b"q" * LARGEST_HEAD_BYTES),
    ],
    ids=["one header", "many headers", "empty headers", "path"],
)
def test_a_head_that_is_too_large_is_431(scripted: RunningServer, head: bytes) -> None:
    answer = exchange(scripted, head + END)
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]
    assert b"larger than 32768 bytes" in answer
    assert scripted.recommend(history=[]).status_code == 200


def test_an_unfinished_header_is_refused_while_it_streams(scripted: RunningServer) -> None:
    sent = 0
    with connect(scripted) as connection, pytest.raises(ConnectionError):
        connection.sendall(START + b"X: ")
        while sent < 64 << 20:
            connection.sendall(b"v" * (1 << 16))
            sent += 1 << 16
    assert sent < 64 << 20


def test_each_request_of_a_connection_is_counted_alone(scripted: RunningServer) -> None:
    headers = b"X: %s\r\n" % (b"v" * 20_000)
    answer = exchange(scripted, START + headers + b"\r\n", START + headers + b"\r\n", START + headers + END)
    assert answer.count(b"HTTP/1.1 200 ") == 3


def test_a_pipeline_is_answered_up_to_a_bound(scripted: RunningServer) -> None:
    short = exchange(scripted, (START + b"\r\n") * LONGEST_PIPELINE + START + END)
    assert short.count(b"HTTP/1.1 200 ") == LONGEST_PIPELINE + 1
    long = exchange(scripted, (START + b"\r\n") * (LONGEST_PIPELINE + 100))
    assert long.count(b"HTTP/1.1 200 ") <= LONGEST_PIPELINE
    assert scripted.recommend(history=[]).status_code == 200


POST = b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"history":[]}'


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 14\r\nContent-Length: 15\r\n\r\n" + BODY,
        POST + b"Content-Length: +14\r\n\r\n" + BODY,
        POST + b"Content-Length : 14\r\n\r\n" + BODY,
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
        POST + b"Transfer-Encoding: xchunked\r\n\r\n" + BODY,
        POST + b"X: a\r\n b\r\nContent-Length: 14\r\n\r\n" + BODY,
        POST + b"X: a\0b\r\nContent-Length: 14\r\n\r\n" + BODY,
        POST.replace(b"\r\n", b"\n") + b"Content-Length: 14\n\n" + BODY,
    ],
    ids=lambda given: repr(given[len(POST) :][:40]),
)
def test_what_a_proxy_may_read_otherwise_is_refused(scripted: RunningServer, request_bytes: bytes) -> None:
    """One that saw two requests here could be made to hand a second one past its own rules."""
    answer = exchange(scripted, request_bytes + START + END)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_malformed_bytes_are_still_400(scripted: RunningServer) -> None:
    assert exchange(scripted, b"NONSENSE\x00 / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    broken = b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n"
    assert exchange(scripted, broken).startswith(b"HTTP/1.1 400 ")


def test_a_head_that_does_not_end_is_408(scripted: RunningServer) -> None:
    started = time.monotonic()
    with connect(scripted) as connection:
        connection.settimeout(20)
        connection.sendall(START + b"X: 1")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert 9 < time.monotonic() - started < 15
