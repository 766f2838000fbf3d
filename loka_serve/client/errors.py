"""Errors of the client: what the server refused, by kind, and what never came to an answer."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping

import msgspec
from msgspec import Struct


class ClientError(Exception):
    """Base of all errors that the client raises."""


class NoAnswer(ClientError):
    """There was no answer, or none that can be read: no connection, a timeout, something else at that address."""


class FieldError(Struct, frozen=True):
    """One field of the request that is not as expected."""

    field: str
    message: str


class RequestFailed(ClientError):
    """The server answered with a problem.

    Attributes:
        status: of HTTP.
        type: the problem's URI, such as `urn:loka-serve:problem:queue-full`.
        detail: one sentence.
        request_id: to find the request in the server's log.
        errors: fields that are wrong, where it is the request's fault.
        retry_after: seconds after which a new attempt makes sense, where the server says so.
    """

    def __init__(
        self,
        status: int,
        type: str = "",
        detail: str = "",
        request_id: str = "",
        errors: tuple[FieldError, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{status}: {detail}" + (f" (request {request_id})" if request_id else ""))
        self.status = status
        self.type = type
        self.detail = detail
        self.request_id = request_id
        self.errors = errors
        self.retry_after = retry_after


class InvalidRequest(RequestFailed):
    """400, 413, 415, 422: the same request will fail again; `errors` name the fields."""


class NotAllowed(RequestFailed):
    """401, 403: the API key is missing, unknown, or of too small a scope."""


class Overloaded(RequestFailed):
    """429: too many requests are waiting."""


class Unavailable(RequestFailed):
    """503: not ready, draining, or the engine restarts."""


class DeadlineExceeded(RequestFailed):
    """504: the request's own `timeout_ms`, or the server's default, has passed."""


_KINDS: dict[int, type[RequestFailed]] = {
    **dict.fromkeys((400, 413, 415, 422), InvalidRequest),
    **dict.fromkeys((401, 403), NotAllowed),
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}


class _Problem(Struct, frozen=True):
    """Problem details (RFC 9457), as far as they are read."""

    type: str = ""
    detail: str = ""
    request_id: str = ""
    errors: tuple[FieldError, ...] = ()


def failure_of(status: int, body: bytes, headers: Mapping[str, str]) -> RequestFailed:
    """The error of an answer; its body need not be a problem, as a proxy may have written it."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        problem = _Problem(detail=body[:200].decode(errors="replace"), request_id=headers.get("x-request-id", ""))
    kind = _KINDS.get(status, RequestFailed)
    retry_after = retry_after_of(headers.get("retry-after"))
    return kind(status, problem.type, problem.detail, problem.request_id, problem.errors, retry_after)


def retry_after_of(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date; None if there is none that can be read."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
