"""Around every request: its id, its count and its last resort. Plain ASGI, so that a client's leaving stays visible."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, replace

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loka_serve.server.batch_log import BatchRecord
from loka_serve.server.encoding import encode
from loka_serve.server.problems import CONTENT_TYPE, INTERNAL, UNEXPECTED, ProblemError
from loka_serve.server.state import ServerState

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
TRACED_PREFIXES = ("/v1/recommend", "/v2/models/")
_SCOPE_KEY = "loka_serve.request"


@dataclass(frozen=True)
class RequestContext:
    """What is known of a request before its body.

    Attributes:
        arrival: of time.monotonic.
        key_name: name of the API key that it came with; None where none is needed.
        batches: where tracing is on: the batches that it was computed in, added once it is.
    """

    request_id: str
    arrival: float
    key_name: str | None = None
    batches: list[BatchRecord] | None = None


def context_of(request: Request) -> RequestContext:
    """What the middleware noted about a request."""
    context: RequestContext = request.scope[_SCOPE_KEY]
    return context


def problem_response(error: ProblemError, request_id: str, path: str) -> Response:
    """A problem as an HTTP answer to a request for `path`."""
    return Response(
        encode(error.problem(request_id, path)), error.kind.status, error.headers(), media_type=CONTENT_TYPE
    )


class Envelope:
    """The outermost layer of our own: request id in and out, metrics by route template, no exception gets past."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_traced = self.state.tracing is not None and _is_recommendation(scope)
        context = RequestContext(_request_id(scope), time.monotonic(), batches=[] if is_traced else None)
        scope[_SCOPE_KEY] = context
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = context.request_id
                if self.state.draining:
                    headers["connection"] = "close"
            await send(message)

        self.state.requests_in_flight += 1
        try:
            key = self.state.access.check(scope)
            if key is not None:
                scope[_SCOPE_KEY] = context = replace(context, key_name=key.name)
            await self.app(scope, receive, send_with_headers)
        except ProblemError as refusal:  # of `check`: the application answers its own
            await problem_response(refusal, context.request_id, scope["path"])(scope, receive, send_with_headers)
        except Exception:
            logger.exception(
                "request %s failed unexpectedly", context.request_id, extra={"request_id": context.request_id}
            )
            if not status:
                error = ProblemError(INTERNAL, UNEXPECTED)
                await problem_response(error, context.request_id, scope["path"])(scope, receive, send_with_headers)
        finally:
            self.state.requests_in_flight -= 1
            route = route_of(scope)
            self.state.metrics.responses.labels(route, str(status)).inc()
            self.state.metrics.request_seconds.labels(route).observe(time.monotonic() - context.arrival)
            if is_traced:
                self._trace(scope, context, route, status)

    def _trace(self, scope: Scope, context: RequestContext, route: str, status: int) -> None:
        assert self.state.tracing is not None
        try:
            self.state.tracing.record(scope, context, route, status)
        except Exception:  # the request itself is answered
            logger.exception("the spans of a request were not made", extra={"request_id": context.request_id})


def route_of(scope: Scope) -> str:
    """The route's template; one label for all paths that no route has."""
    return getattr(scope.get("route"), "path", "unmatched")


def _is_recommendation(scope: Scope) -> bool:
    """Whether a request is worth a trace: not that of a probe, a scanner or a scraper."""
    return scope["method"] == "POST" and scope["path"].startswith(TRACED_PREFIXES)


def _request_id(scope: Scope) -> str:
    """The client's own id if it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID.encode():
            text = value.decode("latin-1")
            if _ACCEPTED_ID.fullmatch(text):
                return str(text)
    return uuid.uuid4().hex
