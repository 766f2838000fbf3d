"""The hot routes: POST /v1/recommend and POST /v1/recommend/batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loka_serve.catalog.catalog import Catalog
from loka_serve.server.answers import recommend_answer
from loka_serve.server.batcher import Batcher
from loka_serve.server.bodies import ReadingRoom, decode_batch, decode_recommend, read_body
from loka_serve.server.encoding import json_response
from loka_serve.server.middleware import RequestContext, context_of
from loka_serve.server.problems import (
    CANCELLED,
    DEADLINE,
    FAILED,
    INTERNAL,
    INVALID,
    QUEUE_FULL,
    TOO_LARGE,
    UNAVAILABLE,
    UNEXPECTED,
    ProblemError,
    invalid,
)
from loka_serve.server.queue import Ticket
from loka_serve.server.resolution import ResolvedRequest, ServedModel, resolve
from loka_serve.server.schemas import RecommendRequest
from loka_serve.server.state import ServerState

logger = logging.getLogger(__name__)

RECOMMEND_PATH = "/v1/recommend"
BATCH_PATH = "/v1/recommend/batch"
OK = "ok"
OUTCOMES = (
    OK,
    *(kind.outcome for kind in (CANCELLED, DEADLINE, FAILED, INTERNAL, INVALID, QUEUE_FULL, TOO_LARGE, UNAVAILABLE)),
)
Decode = Callable[[bytes | msgspec.Raw], RecommendRequest]
PLACE_SECONDS = 1.0  # that a body may take to arrive and keep its place in the queue; later it has to find a new one
LEAST_ROOM_BYTES = 256 << 20
LARGE_BODY_BYTES = 128 << 10  # beyond that a thread decodes, which lets the event loop in between
LONGEST_TENANT = 128  # of its name; longer ones are cut, and share a place if they begin alike
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
        self._room = ReadingRoom(max(LEAST_ROOM_BYTES, state.config.max_body_bytes))
        for route in (RECOMMEND_PATH, BATCH_PATH):
            state.metrics.expect(route, OUTCOMES)

    async def recommend(self, request: Request) -> Response:
        """One request, one answer."""
        return await self.answer_one(request, RECOMMEND_PATH, decode_recommend, json_response)

    async def answer_one(
        self, request: Request, route: str, decode: Decode, respond: Callable[[dict[str, Any]], Response]
    ) -> Response:
        """From a body in whatever form to an answer in it.

        Args:
            decode: raises ProblemError (422); large bodies are decoded in a thread.
            respond: gets the members of schemas.RecommendResponse.
        """
        context = context_of(request)
        outcome = CANCELLED.outcome
        try:
            body = await self._read(request)
            pending = await self._submit(body, context, self._tenant(request), decode)
            await self._wait(request, [pending.ticket])
            response = respond(self._answer(pending, context.request_id, context))
            outcome = OK
        except ProblemError as error:
            outcome = error.kind.outcome
            raise
        except Exception:
            outcome = INTERNAL.outcome
            raise
        finally:
            self._count(route, outcome, context)
        return response

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
        except Exception:
            self._count(BATCH_PATH, INTERNAL.outcome, context)
            raise
        submitted: list[Pending | ProblemError] = []
        try:
            for index, element in enumerate(elements):
                submitted.append(await self._submit_element(element, context, self._tenant(request), index))
                if index % DECODED_AT_ONCE == DECODED_AT_ONCE - 1:
                    await asyncio.sleep(0)
            await self._wait(request, _tickets(submitted))
        finally:
            self._drop(_tickets(submitted))  # whatever ended this, nothing is computed for nobody
        responses = [
            self._element(pending, f"{context.request_id}-{index}", context) for index, pending in enumerate(submitted)
        ]
        return json_response({"request_id": context.request_id, "responses": responses})

    async def _read(self, request: Request) -> bytes:
        """The body; a place in the queue is held meanwhile, so that a full one refuses before anything is read."""
        config = self.state.config
        self.state.require_not_draining()
        with place_in_queue(self.state.batcher, self._tenant(request)):
            return await read_body(request, config.max_body_bytes, config.body_timeout_s, self._room)

    def _timeout(self, milliseconds: float | None) -> float:
        """Seconds that a request has from its arrival."""
        return (self.state.config.default_timeout_ms if milliseconds is None else milliseconds) / 1000

    def _tenant(self, request: Request) -> str:
        """Who asks, by the header that the settings name; empty without one."""
        name = self.state.config.tenant_header
        return request.headers.get(name, "")[:LONGEST_TENANT] if name else ""

    async def _submit(
        self, body: bytes | msgspec.Raw, context: RequestContext, tenant: str, decode: Decode = decode_recommend
    ) -> Pending:
        model, catalogs = self.state.model, self.state.catalogs
        if memoryview(body).nbytes <= LARGE_BODY_BYTES:
            asked = decode(body)
            self.state.batcher.require_hope(context.arrival + self._timeout(asked.timeout_ms), asked.priority)
            resolved = resolve(asked, model, catalogs.live)
        else:
            resolved = await asyncio.to_thread(_decode_and_resolve, decode, body, model, catalogs.live)
            if resolved.catalog not in (catalogs.live, catalogs.previous):  # replaced meanwhile: the engine forgets it
                resolved = resolve(decode(body), model, catalogs.live)
        timeout = self._timeout(resolved.timeout_ms)
        ticket = self.state.batcher.submit(
            resolved.wire,
            resolved.catalog.version,
            context.arrival,
            timeout,
            context=resolved.history_length,
            priority=resolved.priority,
            tenant=tenant,
        )
        return Pending(resolved, ticket)

    async def _submit_element(
        self, element: msgspec.Raw, context: RequestContext, tenant: str, index: int
    ) -> Pending | ProblemError:
        """One request of a batch, or what is wrong with it: nothing in it may fail the others."""
        try:
            return await self._submit(element, context, tenant)
        except ProblemError as error:
            return error
        except Exception:
            return _unexpected(f"{context.request_id}-{index}")

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
        if context.batches is not None:
            context.batches.append(answer.batch)
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
        except Exception as error:
            problem = error if isinstance(error, ProblemError) else _unexpected(request_id)
            self._count(BATCH_PATH, problem.kind.outcome, context)
            return problem.problem(request_id)
        self._count(BATCH_PATH, OK, context)
        return answer

    def _count(self, route: str, outcome: str, context: RequestContext) -> None:
        self.state.metrics.requests.labels(route, outcome).inc()
        self.state.window.request(outcome, time.monotonic() - context.arrival)


@contextlib.contextmanager
def place_in_queue(batcher: Batcher, tenant: str = "") -> Iterator[None]:
    """Hold a place, but not for long: clients that send slowly must not fill the queue for those who do not.

    Raises:
        ProblemError: 503 without an engine, 429 if the queue is full, or the tenant's part of it.
    """
    batcher.reserve(tenant)
    is_held = True

    def give_back() -> None:
        nonlocal is_held
        if is_held:
            is_held = False
            batcher.release(tenant)

    timer = asyncio.get_running_loop().call_later(PLACE_SECONDS, give_back)
    try:
        yield
    finally:
        timer.cancel()
        give_back()


def _decode_and_resolve(
    decode: Decode, body: bytes | msgspec.Raw, model: ServedModel, catalog: Catalog
) -> ResolvedRequest:
    return resolve(decode(body), model, catalog)


def _tickets(submitted: Sequence[Pending | ProblemError]) -> list[Ticket]:
    return [pending.ticket for pending in submitted if isinstance(pending, Pending)]


def _unexpected(request_id: str) -> ProblemError:
    """What an element of a batch answers when an exception that nobody foresaw is being handled."""
    logger.exception("request %s failed unexpectedly", request_id, extra={"request_id": request_id})
    return ProblemError(INTERNAL, UNEXPECTED)
