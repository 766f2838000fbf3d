"""Errors as HTTP answers: RFC 9457 problem details with a request id; nothing of the server's inside shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

KSERVE_PREFIX = "/v2"
CONTENT_TYPE = "application/problem+json"
# Characters of a text that may quote the client; of a longer one the middle, where the quoted value is, is left out.
LONGEST_FIELD, LONGEST_TEXT = 200, 600


class FieldError(msgspec.Struct, frozen=True):
    """One field of the request body that is not as expected."""

    field: str
    message: str


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Problem details (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[FieldError] = []
    error: Annotated[str, Meta(description="The detail again, where clients of the open inference protocol look.")] = ""


@dataclass(frozen=True)
class ProblemKind:
    """A row of the error table: `outcome` is its label in metrics and the end of its type URI."""

    outcome: str
    status: int
    title: str


NOT_FOUND = ProblemKind("not_found", 404, "No such resource")
METHOD_NOT_ALLOWED = ProblemKind("method_not_allowed", 405, "Method not allowed")
BODY_TIMEOUT = ProblemKind("body_timeout", 408, "The request body took too long")
UNAUTHORIZED = ProblemKind("unauthorized", 401, "A key is needed")
CONFLICT = ProblemKind("conflict", 409, "Not possible in the present state")
TOO_LARGE = ProblemKind("too_large", 413, "The request body is too large")
UNSUPPORTED_ENCODING = ProblemKind("unsupported_encoding", 415, "Unsupported content encoding")
FORBIDDEN = ProblemKind("forbidden", 403, "Not allowed")
INVALID = ProblemKind("invalid", 422, "The request is not valid")
QUEUE_FULL = ProblemKind("queue_full", 429, "Too many requests are waiting")
CANCELLED = ProblemKind("cancelled", 499, "The client went away")
FAILED = ProblemKind("failed", 500, "The request could not be computed")
INTERNAL = ProblemKind("internal", 500, "Internal error")
UNAVAILABLE = ProblemKind("unavailable", 503, "The service is not ready")
DEADLINE = ProblemKind("deadline", 504, "The deadline has passed")
OF_RECOMMENDATIONS = (BODY_TIMEOUT, TOO_LARGE, UNSUPPORTED_ENCODING, INVALID, QUEUE_FULL, INTERNAL, UNAVAILABLE)
UNEXPECTED = "the server could not handle this request"


class ProblemError(Exception):
    """Raised anywhere in a request's handling; becomes a problem answer.

    Args:
        kind: row of the error table.
        detail: one sentence for the client.
        errors: for 422, the fields.
        retry_after: seconds after which a new attempt makes sense.
    """

    def __init__(
        self,
        kind: ProblemKind,
        detail: str,
        errors: Sequence[FieldError] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(shorten(detail, LONGEST_TEXT))
        self.kind = kind
        self.detail = shorten(detail, LONGEST_TEXT)
        self.errors = [
            FieldError(shorten(error.field, LONGEST_FIELD), shorten(error.message, LONGEST_TEXT)) for error in errors
        ]
        self.retry_after = retry_after

    def problem(self, request_id: str, path: str = "") -> Problem:
        """The body of the answer to a request for `path`."""
        return Problem(
            type=f"urn:loka-serve:problem:{self.kind.outcome.replace('_', '-')}",
            title=self.kind.title,
            status=self.kind.status,
            detail=self.detail,
            instance=f"urn:loka-serve:request:{request_id}",
            request_id=request_id,
            errors=self.errors,
            error=self.detail if path.startswith(KSERVE_PREFIX) else "",
        )

    def headers(self) -> dict[str, str]:
        """Headers beside the content type; Retry-After in whole seconds, at least one."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.kind is UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if self.kind in (TOO_LARGE, BODY_TIMEOUT):
            headers["Connection"] = "close"  # the rest of the body will not be read
        return headers


def shorten(text: str, longest: int) -> str:
    """At most `longest` characters of a text: its begin and its end, and between them how many are left out."""
    if len(text) <= longest:
        return text
    kept = longest - 40  # room for the note
    begin, end = kept * 2 // 3, kept // 3
    return f"{text[:begin]} [{len(text) - begin - end} characters left out] {text[-end:]}"


def invalid(field: str, message: str) -> ProblemError:
    """422 for one field."""
    return ProblemError(INVALID, f"{field}: {message}", [FieldError(field, message)])
