"""The hot routes: POST /v1/recommend and POST /v1/recommend/batch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loka_serve.server.answers import recommend_answer
from loka_serve.server.batcher import Ticket
from loka_serve.server.bodies import decode_batch, decode_recommend, read_body
from loka_serve.server.encoding import json_response
from loka_serve.server.middleware import RequestContext, context_of
from loka_serve.server.problems import (
    CANCELLED,
    DEADLINE,
    FAILED,
    INVALID,
    QUEUE_FULL,
    TOO_LARGE,
    UNAVAILABLE,
    ProblemError,
    invalid,
)
from loka_serve.server.resolution import ResolvedRequest, resolve
from loka_serve.server.state import ServerState

RECOMMEND_PATH = "/v1/recommend"
BATCH_PATH = "/v1/recommend/batch"
OK = "ok"
OUTCOMES = (OK, *(kind.outcome for kind in (CANCELLED, DEADLINE, FAILED, INVALID, QUEUE_FULL, TOO_LARGE, UNAVAILABLE)))
DECODED_AT_ONCE = 8  # elements of a batch between two looks at other clients


@dataclass(frozen=True)
class Pending:
    """A request that is queued or computed."""

    resolved: ResolvedRequest
    ticket: Ticket


class RecommendRoutes:
    """Handlers that share one server's state."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        for route in (RECOMMEND_PATH, BATCH_PATH):
            state.metrics.expect(route, OUTCOMES)

    async def recommend(self, request: Request) -> Response:
        """One request, one answer."""
        context = context_of(request)
        outcome = CANCELLED.outcome
        try:
            body = await self._read(request)
            pending = self._submit(body, context)
            await self._wait(request, [pending.ticket])
            answer = self._answer(pending, context.request_id, context)
            outcome = OK
        except ProblemError as error:
            outcome = error.kind.outcome
            raise
        finally:
            self._count(RECOMMEND_PATH, outcome, context)
        return json_response(answer)

    async def recommend_batch(self, request: Request) -> Response:
        """Many requests; each is answered or fails alone."""
        context = context_of(request)
        try:
            elements = decode_batch(await self._read(request)).requests
            most = self.state.config.max_batch_requests
            if len(elements) > most:
                raise invalid("requests", f"expected 1 to {most} requests, got {len(elements)}")
        except ProblemError as error:
            self._count(BATCH_PATH, error.kind.outcome, context)
            raise
        submitted: list[Pending | ProblemError] = []
        for index, element in enumerate(elements):
            try:
                submitted.append(self._submit(element, context))
            except ProblemError as error:
                submitted.append(error)
            if index % DECODED_AT_ONCE == DECODED_AT_ONCE - 1:
                await asyncio.sleep(0)
        await self._wait(request, [pending.ticket for pending in submitted if isinstance(pending, Pending)])
        responses = [
            self._element(pending, f"{context.request_id}-{index}", context) for index, pending in enumerate(submitted)
        ]
        return json_response({"request_id": context.request_id, "responses": responses})

    async def _read(self, request: Request) -> bytes:
        """The body; a place in the queue is held meanwhile, so that a full one refuses before anything is read."""
        config, batcher = self.state.config, self.state.batcher
        self.state.require_not_draining()
        batcher.reserve()
        try:
            return await read_body(request, config.max_body_bytes, config.body_timeout_s)
        finally:
            batcher.release()

    def _submit(self, body: bytes | msgspec.Raw, context: RequestContext) -> Pending:
        resolved = resolve(decode_recommend(body), self.state.model, self.state.catalogs.live)
        timeout = self.state.config.default_timeout_ms / 1000 if resolved.timeout is None else resolved.timeout
        ticket = self.state.batcher.submit(resolved.wire, resolved.catalog.version, context.arrival, timeout)
        return Pending(resolved, ticket)

    async def _wait(self, request: Request, tickets: Sequence[Ticket]) -> None:
        """Until each ticket is answered or has failed; all are dropped when the client leaves."""
        watcher = asyncio.create_task(self._drop_on_disconnect(request, tickets))
        try:
            for ticket in tickets:
                with contextlib.suppress(ProblemError):
                    await ticket.future
        finally:
            watcher.cancel()
            self._drop(tickets)

    async def _drop_on_disconnect(self, request: Request, tickets: Sequence[Ticket]) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._drop(tickets)

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if not ticket.future.done():
                self.state.batcher.drop(ticket)

    def _answer(self, pending: Pending, request_id: str, context: RequestContext) -> dict[str, Any]:
        """The body of an answer; raises the ProblemError of a request that failed."""
        answer = pending.ticket.future.result()
        seconds = time.monotonic() - context.arrival
        body = recommend_answer(pending.resolved, answer, self.state.model.name, request_id, seconds)
        metrics = self.state.metrics
        metrics.items.inc(len(body["items"]))
        metrics.unknown_items.inc(pending.resolved.unknown_items)
        if not answer.result.complete:
            metrics.short_answers.inc()
        return body

    def _element(self, pending: Pending | ProblemError, request_id: str, context: RequestContext) -> Any:
        """The answer of one element of a batch, or its problem."""
        try:
            if isinstance(pending, ProblemError):
                raise pending
            answer = self._answer(pending, request_id, context)
        except ProblemError as error:
            self._count(BATCH_PATH, error.kind.outcome, context)
            return error.problem(request_id)
        self._count(BATCH_PATH, OK, context)
        return answer

    def _count(self, route: str, outcome: str, context: RequestContext) -> None:
        self.state.metrics.requests.labels(route, outcome).inc()
        self.state.window.request(outcome, time.monotonic() - context.arrival)
