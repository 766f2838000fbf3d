"""When the client tries again: what is worth it, for how long, and what the server asks for."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from loka_serve.client import AsyncClient, Client, NoAnswer, Overloaded, RequestFailed, Retries, Unavailable
from loka_serve.client.errors import InvalidRequest, failure_of, retry_after_of
from loka_serve.client.requests import ROLL_BACK, Call, recommend_call
from loka_serve.client.retries import JITTER

GOOD = {
    "request_id": "r", "model": "m", "catalog_version": "c", "items": [], "complete": True, "new_member": 1,
    "usage": {"history_length": 0, "unknown_items": 0, "beam_width": 1, "batch_size": 1, "queue_ms": 0.0,
              "engine_ms": 0.0, "total_ms": 0.0},
}  # fmt: skip
CALL = recommend_call({"history": []})
Outcome = httpx.Response | Exception


class Script:
    """Answers each attempt with the next outcome, and keeps the time and body of each."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes: Iterator[Outcome] = iter(outcomes)
        self.times: list[float] = []
        self.bodies: list[bytes] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.times.append(time.monotonic())
        self.bodies.append(request.content)
        outcome = next(self.outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def problem(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"detail": "told to", "type": "urn:x", "request_id": "r"}, headers=headers)


def good() -> httpx.Response:
    return httpx.Response(200, json=GOOD)


def ask(kind: str, script: Script, call: Callable[[Any], Any] | None = None, **more: Any) -> Any:
    call = call or (lambda client: client.recommend(history=[]))
    transport = httpx.MockTransport(script)
    more = {"retries": Retries(first_wait=0.001)} | more
    if kind == "sync":
        with Client("http://server", transport=transport, **more) as client:
            return call(client)

    async def run() -> Any:
        async with AsyncClient("http://server", transport=transport, **more) as client:
            return await call(client)

    return asyncio.run(run())


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@KINDS
def test_what_may_pass_is_tried_again(kind: str) -> None:
    script = Script(problem(503), httpx.ConnectError("no"), problem(429), good())
    assert ask(kind, script).model == "m"
    assert script.bodies == [b'{"history":[]}'] * 4


@KINDS
def test_after_the_last_attempt_the_last_error_is_raised(kind: str) -> None:
    script = Script(problem(503), problem(503), problem(429, **{"retry-after": "0"}), good())
    with pytest.raises(Overloaded) as caught:
        ask(kind, script, retries=Retries(attempts=3, first_wait=0.001))
    assert (caught.value.retry_after, len(script.times)) == (0.0, 3)


@KINDS
@pytest.mark.parametrize("status", [401, 403, 404, 409, 413, 422, 500, 504])
def test_what_will_not_pass_is_not_tried_again(kind: str, status: int) -> None:
    script = Script(problem(status, **{"retry-after": "0"}))
    with pytest.raises(RequestFailed) as caught:
        ask(kind, script)
    assert (caught.value.status, len(script.times)) == (status, 1)


@KINDS
def test_retry_after_is_kept_to(kind: str) -> None:
    script = Script(problem(429, **{"retry-after": "1"}), good())
    ask(kind, script)
    assert script.times[1] - script.times[0] >= 1


@KINDS
def test_a_wait_that_the_call_has_no_time_for_is_not_begun(kind: str) -> None:
    started = time.monotonic()
    with pytest.raises(Unavailable, match="told to"):
        ask(kind, Script(problem(503, **{"retry-after": "30"})), timeout=2)
    assert time.monotonic() - started < 2


@KINDS
def test_a_rollback_of_which_nobody_knows_is_not_tried_again(kind: str) -> None:
    script = Script(httpx.ReadError("gone"))
    with pytest.raises(NoAnswer, match="POST /v1/catalog/rollback: ReadError: gone"):
        ask(kind, script, lambda client: client.roll_back_catalog())
    assert len(script.times) == 1


@KINDS
@pytest.mark.parametrize("content", [b"<html>", b"{}", b'{"request_id": 3}', b"[" * 100_000, b"\xff"])
def test_an_answer_that_is_none_is_no_answer(kind: str, content: bytes) -> None:
    with pytest.raises(NoAnswer, match="the answer is not as expected"):
        ask(kind, Script(httpx.Response(200, content=content)))


def test_waits_double_at_random_and_what_the_server_asks_for_is_spread() -> None:
    retries = Retries(attempts=9, first_wait=0.1, longest_wait=0.5)
    for attempt, most in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.5), (8, 0.5)):
        waits = [retries.wait_after(NoAnswer(), CALL, attempt, 60) or 0.0 for _ in range(200)]
        assert min(waits) >= 0 and most / 2 < max(waits) <= most
    asked = [retries.wait_after(Unavailable(503, retry_after=2.0), CALL, 1, 60) or 0.0 for _ in range(200)]
    assert 2 <= min(asked) < max(asked) <= 2 * (1 + JITTER)
    assert retries.wait_after(NoAnswer(), CALL, 9, 60) is None
    assert retries.wait_after(Unavailable(503, retry_after=2.0), CALL, 1, 1) is None
    assert retries.wait_after(NoAnswer(), ROLL_BACK, 1, 60) is None
    assert retries.wait_after(Unavailable(503), ROLL_BACK, 1, 60) is not None
    assert isinstance(CALL, Call)


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after_of("7") == 7
    assert retry_after_of(email.utils.formatdate(time.time() + 60, usegmt=True)) == pytest.approx(60, abs=5)
    assert retry_after_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert [retry_after_of(value) for value in (None, "", "soon", "-1", "1e3")] == [None] * 5


def test_an_error_of_a_proxy_is_read_as_far_as_it_goes() -> None:
    error = failure_of(503, b"<html>bad gateway\xff", {"retry-after": "3", "x-request-id": "r1"})
    assert isinstance(error, Unavailable)
    assert (error.retry_after, error.request_id, error.errors) == (3.0, "r1", ())
    assert str(error) == "503: <html>bad gateway\ufffd (request r1)"
    field = failure_of(422, b'{"detail": "d", "errors": [{"field": "f", "message": "m"}]}', {})
    assert isinstance(field, InvalidRequest) and field.errors[0].field == "f"
