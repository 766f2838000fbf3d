"""uvicorn's HTTP protocol with bounds where no code of the application runs: the head of a request, its size and how
long it may take to arrive, and what a client goes on sending after its request was refused.

A body that is read has bounds of its own in bodies.py.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

LARGEST_HEAD_BYTES = 32 << 10
HEAD_SECONDS = 10.0  # for a head to arrive once its first byte has
LARGEST_REST_BYTES = 1 << 20  # of a body that comes after its answer; beyond that the connection is closed
REST_SECONDS = 10.0
LONGEST_PIPELINE = 64  # requests that wait for the answer to one before them on their connection
_TOO_LARGE = f"the request line and headers are larger than {LARGEST_HEAD_BYTES} bytes"


def bounded_protocol(most_connections: int) -> type[BoundedHeadProtocol]:
    """The protocol of a server that holds so many connections at most."""
    return type("Protocol", (BoundedHeadProtocol,), {"most_connections": most_connections})


class HeadTooLarge(Exception):
    """Raised in a callback of the parser, which stops and reports it as an error of the request."""


class PipelineTooLong(Exception):
    """Raised in a callback of the parser, too: each request that waits takes a hundred times its bytes."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Answers 431 to a head that is too large and 408 to one that does not end, and closes the connection.

    A body that its answer did not wait for is thrown away; one that is long or slow ends the connection.

    Complete headers are counted one by one. One that is unfinished is seen only as bytes that arrive while the head is
    open, so what is held of it may exceed the bound by one read.
    """

    most_connections: ClassVar[int] = 1 << 20
    _head_open = False
    _head_bytes = 0
    _unfinished_bytes = 0
    _refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _body_open = False
    _rest_bytes = 0
    _rest_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
            return
        # One that never says a word is closed like one that has fallen silent.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # the connection is closing
        if self._head_open:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > LARGEST_HEAD_BYTES:
                self._refuse(431, _TOO_LARGE)
                return
        super().data_received(data)
        if self._head_open and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open = True
        self._head_bytes = self._unfinished_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= LONGEST_PIPELINE:
            raise PipelineTooLong
        self._head_open = False
        self._body_open = True
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._rest_bytes += len(body)
            if self._rest_bytes > LARGEST_REST_BYTES:
                self.transport.close()
                return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_open = False
        self._stop_rest_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_open and self.cycle.response_complete and not self.transport.is_closing():
            self._rest_bytes = 0
            self._rest_timer = self.loop.call_later(REST_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser stops, be it at malformed bytes or at an exception of a callback."""
        if self._head_bytes > LARGEST_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)
        else:
            self._refuse(400, msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > LARGEST_HEAD_BYTES:
            raise HeadTooLarge

    def _head_late(self) -> None:
        self._head_timer = None
        self._refuse(408, f"the request line and headers did not arrive within {HEAD_SECONDS:g} s")

    def _refuse(self, status: int, text: str) -> None:
        """Answer in plain text, unless that would break into the answer to an earlier request, and close."""
        self._refused = True
        self._stop_timer()
        cycle: Any = self.cycle
        started = cycle is not None and (self._head_open or cycle.response_started)
        if not started or cycle.response_complete:
            body = text.encode("ascii")
            head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            self.transport.write(b"".join([STATUS_LINE[status], head, b"\r\n", body]))
        self.transport.close()

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
