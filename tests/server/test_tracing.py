"""Spans of requests: what there is, how it nests and how long it takes; and nothing of it where tracing is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from loka_serve.config import ServerConfig
from loka_serve.server import state as state_module
from loka_serve.server.api_keys import ApiKeys
from loka_serve.server.app import create_app
from loka_serve.server.messages import NAN, Batch, BatchResult, WireResult
from loka_serve.server.state import ServerState, build_state, build_tracing
from loka_serve.server.tracing import Tracing, in_order
from loka_serve.settings import ConfigError
from tests.server.processes import running, scripted_command
from tests.server.scripted_server import make_catalog, make_model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TIMINGS = {
    "prepare": 0.001, "context": 0.004, "decode": 0.006, "selection": 0.003, "total": 0.014, "expand": 0.002,
    **{f"decode.{level}": 0.002 for level in range(3)}, **{f"selection.{level}": 0.001 for level in range(3)},
}  # fmt: skip
LEVELS = ["decode.0", "selection.0", "decode.1", "selection.1", "decode.2", "selection.2"]
STAGES = ["prepare", "context", *LEVELS, "expand"]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def state(exporter: InMemorySpanExporter, tmp_path: Path) -> ServerState:
    """A server that is answered a moment later, with the times above; a beam of 13 fails."""
    config = ServerConfig(bundle=tmp_path, default_timeout_ms=2000, max_delay_ms=50)
    state = build_state(config, make_model(), make_catalog(), [sys.executable, "-c", ""])

    def send(batch: Batch) -> None:
        results = [WireResult(error=NAN if wire.beam_width == 13 else None) for wire in batch.requests]
        answer = BatchResult(batch.batch_id, results, TIMINGS)
        asyncio.get_running_loop().call_later(0.03, state.batcher.receive, answer)

    state.batcher.send = send
    state.batcher._up = True
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    state.tracing = Tracing(provider)
    return state


def ask(state: ServerState, path: str = "/v1/recommend", **request: Any) -> Any:
    client = TestClient(create_app(state), raise_server_exceptions=False)
    return client.request(request.pop("method", "POST"), path, **request)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_the_spans_of_a_request(state: ServerState, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "r1"}
    assert ask(state, json={"history": [], "num_items": 3, "beam_width": 9}, headers=headers).status_code == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/recommend", "queue", "batch", *STAGES}
    request, batch = spans["POST /v1/recommend"], spans["batch"]
    assert request.kind is SpanKind.SERVER and request.status.status_code is StatusCode.UNSET
    assert request.parent is not None and format(request.parent.span_id, "016x") == PARENT
    assert {format(span.context.trace_id, "032x") for span in spans.values()} == {TRACE}
    assert dict(request.attributes or {}) == {
        "http.request.method": "POST", "http.route": "/v1/recommend", "http.response.status_code": 200,
        "loka.request_id": "r1",
    }  # fmt: skip
    assert dict(batch.attributes or {}) == {
        "loka.batch_id": 0, "loka.batch_size": 1, "loka.beam_width.max": 9,
        "loka.catalog_version": state.catalogs.live.version,
    }  # fmt: skip
    for name in ("queue", "batch"):
        assert spans[name].parent is not None and spans[name].parent.span_id == request.context.span_id
    for name in STAGES:
        assert spans[name].parent is not None and spans[name].parent.span_id == batch.context.span_id
        assert seconds(spans[name]) == pytest.approx(TIMINGS[name], abs=1e-6)
    ordered = [spans[name] for name in ("queue", "batch")]
    assert ordered[0].end_time == ordered[1].start_time
    assert request.start_time == spans["queue"].start_time
    assert seconds(request) >= seconds(spans["queue"]) + seconds(batch) >= 0.03
    # One after the other, the last one ends with the batch; whole nanoseconds are cut off on the way.
    for before, after in zip(STAGES[:-1], STAGES[1:], strict=True):
        assert spans[before].end_time <= spans[after].start_time + 1000  # type: ignore[operator]
    assert spans["expand"].end_time == batch.end_time


def test_a_batch_request_has_one_batch_span_for_each_batch_that_it_was_in(
    state: ServerState, exporter: InMemorySpanExporter
) -> None:
    requests = [{"history": [], "num_items": 3}] * 12  # batches of 8 and of 4
    assert ask(state, "/v1/recommend/batch", json={"requests": requests}).status_code == 200
    spans = exporter.get_finished_spans()
    assert [span.attributes["loka.batch_size"] for span in spans if span.name == "batch" and span.attributes] == [8, 4]
    assert len([span for span in spans if span.name == "POST /v1/recommend/batch"]) == 1


def test_a_failed_request_is_an_error_and_a_refused_one_is_not(
    state: ServerState, exporter: InMemorySpanExporter
) -> None:
    assert ask(state, json={"history": [], "beam_width": 13, "num_items": 1}).status_code == 500
    assert ask(state, json={"history": 3}).status_code == 422
    failed, refused = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert (failed.status.status_code, refused.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert failed.attributes and failed.attributes["http.response.status_code"] == 500


@pytest.mark.parametrize("sent", ["", "nonsense", "00-" + "0" * 32 + f"-{PARENT}-01", "ff-" + "x" * 5000])
def test_a_traceparent_that_is_none_begins_a_new_trace(
    sent: str, state: ServerState, exporter: InMemorySpanExporter
) -> None:
    headers = {"traceparent": sent, "tracestate": "\x00=,=" * 50}
    assert ask(state, json={"history": []}, headers=headers).status_code == 200
    (span,) = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert span.parent is None and span.context.trace_id != 0


def test_probes_scanners_and_what_is_not_sampled_make_no_span(
    state: ServerState, exporter: InMemorySpanExporter
) -> None:
    for path in ("/health/live", "/metrics", "/v1/recommend", "/scan.php"):
        ask(state, path, method="GET")
    assert exporter.get_finished_spans() == ()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    state.tracing = Tracing(provider)
    assert ask(state, json={"history": []}).status_code == 200
    assert exporter.get_finished_spans() == ()


def test_the_key_s_name_is_told_and_the_key_is_not(
    state: ServerState, exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("shop recommend shop-key-0123456789\n")
    state.access.keys = ApiKeys(tmp_path / "keys")
    assert ask(state, json={"history": []}, headers={"x-api-key": "shop-key-0123456789"}).status_code == 200
    assert ask(state, json={"history": []}, headers={"x-api-key": "another-key-0123456789"}).status_code == 401
    allowed, refused = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert allowed.attributes and allowed.attributes["loka.api_key_name"] == "shop"
    assert refused.attributes and "loka.api_key_name" not in refused.attributes
    assert "-key-0123456789" not in str([dict(span.attributes or {}) for span in exporter.get_finished_spans()])


def test_a_fault_in_tracing_costs_no_request(state: ServerState, caplog: pytest.LogCaptureFixture) -> None:
    state.tracing._tracer = None  # type: ignore[union-attr, assignment]
    assert ask(state, json={"history": []}).status_code == 200
    assert "the spans of a request were not made" in caplog.text


def test_stages_of_engines_that_know_less() -> None:
    assert in_order(["prepare", "device", "engine", "total", "expand"]) == ["device"]
    assert in_order(["decode", "context", "total"]) == ["decode", "context"]
    assert in_order(["total"]) == []


def test_tracing_without_its_packages_is_refused_and_off_loads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(bundle=tmp_path, tracing="otlp")
    monkeypatch.setitem(sys.modules, "loka_serve.server.tracing", None)
    with pytest.raises(ConfigError, match="^--tracing otlp: needs the extra otel: "):
        build_tracing(config)
    assert state_module.build_tracing(ServerConfig(bundle=tmp_path)) is None
    unwanted = "{'opentelemetry.sdk', 'loka_serve.server.tracing'}"
    code = f"import sys, loka_serve.serve; sys.exit(bool({unwanted} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP endpoint and what it got."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


def test_a_collector_gets_the_spans_at_the_latest_when_the_server_ends(
    collector: tuple[str, list[ExportTraceServiceRequest]], catalog_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with running(scripted_command(catalog_file, "--tracing", "otlp")) as server:
        assert server.recommend(history=[]).status_code == 200
    (resource,) = [resource for request in received for resource in request.resource_spans]
    assert {"service.name": "loka-serve"}.items() <= {
        attribute.key: attribute.value.string_value for attribute in resource.resource.attributes
    }.items()
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert {"POST /v1/recommend", "queue", "batch", "prepare", "decode", "expand"} == names
