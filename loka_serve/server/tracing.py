"""OpenTelemetry spans of recommendation requests: queue, batch, and in it each stage that the engine has timed.

Spans are made from figures that are there anyway, once the answer is on its way: nothing is traced while a request is
handled. Durations of stages are the engine's own; where in its batch a stage stands follows from their order. Imported
only where tracing is on, as the packages of the extra `otel` may not be there otherwise.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from loka_serve import __version__
from loka_serve.server.batch_log import BatchRecord

if TYPE_CHECKING:
    from loka_serve.server.middleware import RequestContext

SHUTDOWN_SECONDS, POLL_SECONDS = 2.0, 0.02
AROUND = ("prepare", "expand")  # stages before and after the engine
WHOLES = ("total", "engine")  # sums of other stages
_propagator = TraceContextTextMapPropagator()


def otlp_provider() -> TracerProvider:
    """Sends to an OpenTelemetry collector; OTEL_* variables say where to, which requests, and under which name."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME)).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "loka-serve"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Tracing:
    """Makes the spans of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("loka_serve", __version__)

    def record(self, scope: Scope, context: RequestContext, route: str, status: int) -> None:
        """The spans of a request that is answered now; its parent is the client's, if it sent a `traceparent`."""
        offset = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=_propagator.extract(_trace_headers(scope)),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(context.arrival, offset),
            attributes={
                "http.request.method": scope["method"],
                "http.route": route,
                "loka.request_id": context.request_id,
            },
        )
        if span.is_recording():
            if context.key_name is not None:
                span.set_attribute("loka.api_key_name", context.key_name)
            if status:  # none where the client went away
                span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            for batch in {id(batch): batch for batch in context.batches or ()}.values():
                self._record_batch(span, batch, context.arrival, offset)
        span.end(_nanoseconds(time.monotonic(), offset))

    async def shutdown(self) -> None:
        """Send what is left, but do not wait long for a collector that does not take it."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    def _record_batch(self, request: Span, batch: BatchRecord, arrival: float, offset: int) -> None:
        self._child(request, "queue", arrival, batch.started, offset)
        attributes: dict[str, str | int] = {
            "loka.batch_id": batch.batch_id,
            "loka.batch_size": batch.size,
            "loka.beam_width.max": max(batch.beam_widths),
            "loka.catalog_version": batch.catalog_version,
        }
        span = self._child(request, "batch", batch.started, batch.finished, offset, attributes)
        for name, start, end in placed_stages(batch):
            self._child(span, name, start, end, offset)

    def _child(
        self,
        parent: Span,
        name: str,
        start: float,
        end: float,
        offset: int,
        attributes: dict[str, str | int] | None = None,
    ) -> Span:
        context = set_span_in_context(parent)
        span = self._tracer.start_span(
            name, context=context, start_time=_nanoseconds(start, offset), attributes=attributes
        )
        span.end(_nanoseconds(end, offset))
        return span


def placed_stages(batch: BatchRecord) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of a batch's stages, of time.monotonic: the last one ends with the batch, the others before.

    A stage of which the levels are known is given by level.
    """
    timings = batch.timings
    expanding = batch.finished - timings.get("expand", 0.0)
    engine = expanding - timings.get("total", 0.0)
    if "prepare" in timings:
        yield "prepare", engine - timings["prepare"], engine
    position = engine
    for name in in_order(list(timings)):
        yield name, position, position + timings[name]
        position += timings[name]
    if "expand" in timings:
        yield "expand", expanding, batch.finished


def in_order(names: Sequence[str]) -> list[str]:
    """The engine's own stages as they follow each other: what has no levels, then level by level."""
    by_level = {name.partition(".")[0] for name in names if "." in name}
    own = [name for name in names if name not in by_level and name not in AROUND and name not in WHOLES]
    return sorted(own, key=lambda name: int(name.partition(".")[2] or -1))


def _trace_headers(scope: Scope) -> dict[str, str]:
    """The headers of W3C trace context; the first of each, as several are none."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in (b"traceparent", b"tracestate"):
            found.setdefault(name.decode(), value.decode("latin-1"))
    return found


def _nanoseconds(moment: float, offset: int) -> int:
    """Since the epoch, of a moment of time.monotonic."""
    return int(moment * 1e9) + offset
