"""Prometheus metrics of the API process. Labels are route templates, outcomes and stages, never what a client wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from loka_serve import __version__
from loka_serve.engines.base import SiteDrift
from loka_serve.server.messages import EXCEPTION, INVALID, NAN, DeviceMemory

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STAGE_SECONDS = (0.00025, 0.0005, 0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
BEAMS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


# Else each counter and histogram has one more series, which nothing reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


class ServerMetrics:
    """All series of one server, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "loka_requests",
            "Recommendations by outcome; each of a batch counts.",
            ["route", "outcome"],
            registry=registry,
        )
        self.responses = Counter("loka_http_responses", "HTTP answers.", ["route", "status"], registry=registry)
        self.request_seconds = Histogram(
            "loka_request_seconds",
            "Arrival to answer, whole HTTP requests.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "loka_queue_seconds", "Arrival of a request to its batch's start.", buckets=STAGE_SECONDS, registry=registry
        )
        self.batch_size = Histogram("loka_batch_size", "Requests of a batch.", buckets=SIZES, registry=registry)
        self.padding_ratio = Histogram(
            "loka_padding_ratio", "Share of a batch that is padding.", ["dimension"], buckets=RATIOS, registry=registry
        )
        self.engine_seconds = Histogram(
            "loka_engine_seconds", "Seconds of a batch by stage.", ["stage"], buckets=STAGE_SECONDS, registry=registry
        )
        self.beam_width = Histogram("loka_beam_width", "Beams of a request.", buckets=BEAMS, registry=registry)
        self.items = Counter("loka_items", "Items returned.", registry=registry)
        self.unknown_items = Counter(
            "loka_unknown_items", "History items that no catalog entry has.", registry=registry
        )
        self.short_answers = Counter(
            "loka_short_answers", "Answers with fewer items than asked for, as no more exist.", registry=registry
        )
        self.invalid_answers = Counter(
            "loka_invalid_answers", "Engine answers that were refused.", ["reason"], registry=registry
        )
        self.refused_keys = Counter(
            "loka_refused_keys", "Requests whose API key was missing, unknown or of too small a scope.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.queue_depth = Gauge("loka_queue_depth", "Requests that wait for a batch.", registry=registry)
        self.requests_in_flight = Gauge("loka_requests_in_flight", "HTTP requests being handled.", registry=registry)
        self.batches_in_flight = Gauge("loka_batches_in_flight", "Batches at the engine.", registry=registry)
        self.engine_up = Gauge("loka_engine_up", "1 while the engine takes batches.", registry=registry)
        self.engine_restarts = Counter(
            "loka_engine_restarts", "Starts of the engine after the first.", registry=registry
        )
        self.catalog_info = Gauge("loka_catalog_info", "1 for the live catalog.", ["version"], registry=registry)
        self.catalog_items = Gauge("loka_catalog_items", "Items of the live catalog.", registry=registry)
        self.catalog_swaps = Counter(
            "loka_catalog_swaps", "Catalog updates by outcome.", ["outcome"], registry=registry
        )
        self.dispatch_info = Gauge(
            "loka_dispatch_info",
            "1 for where the engine's dispatch table is from, and why it is not a loaded one.",
            ["source", "reason_class"],
            registry=registry,
        )
        self.drift_psi = Gauge(
            "loka_drift_psi",
            "Population stability index of a site's inputs against calibration's.",
            ["site"],
            registry=registry,
        )
        self.drift_amax_ratio = Gauge(
            "loka_drift_amax_ratio",
            "Largest input of a site over calibration's largest.",
            ["site"],
            registry=registry,
        )
        self.drift_in_fallback = Gauge(
            "loka_drift_site_in_fallback",
            "1 while a site computes in BF16 because its inputs drifted.",
            ["site"],
            registry=registry,
        )
        self.drift_fallbacks = Counter(
            "loka_drift_fallbacks", "Times that a site went into BF16.", ["site"], registry=registry
        )
        self.gpu_memory = Gauge(
            "loka_gpu_memory_bytes",
            "Bytes of the engine's GPU: reserved by the engine, used by all processes, total.",
            ["kind"],
            registry=registry,
        )
        build = Gauge("loka_build_info", "1 for the running version.", ["version"], registry=registry)
        build.labels(__version__).set(1)
        for reason in (NAN, INVALID, EXCEPTION):
            self.invalid_answers.labels(reason)

    def expect(self, route: str, outcomes: Iterable[str]) -> None:
        """Show these series from the start: a rate misses the event that makes a series appear."""
        for outcome in outcomes:
            self.requests.labels(route, outcome)

    def batch_started(self, context_lengths: Sequence[int], beam_widths: Sequence[int]) -> None:
        """Record the shape of a batch that goes to the engine."""
        self.batch_size.observe(len(beam_widths))
        for width in beam_widths:
            self.beam_width.observe(width)
        self.padding_ratio.labels("context").observe(padding(context_lengths))
        self.padding_ratio.labels("beam").observe(padding(beam_widths))

    def batch_finished(self, timings: Mapping[str, float]) -> None:
        """Record the seconds of each stage of a batch; those of a level (`decode.0`) are parts of a stage."""
        for stage, seconds in timings.items():
            if "." in stage:
                continue
            self.engine_seconds.labels(stage).observe(seconds)

    def set_catalog(self, version: str, items: int) -> None:
        """Name the live catalog; the series of the one before goes away."""
        self.catalog_info.clear()
        self.catalog_info.labels(version).set(1)
        self.catalog_items.set(items)

    def set_dispatch(self, source: str | None, reason: str | None) -> None:
        """Say where the engine's dispatch table is from; no series for an engine without one."""
        self.dispatch_info.clear()
        if source is not None:
            self.dispatch_info.labels(source, reason or "none").set(1)

    def expect_drift(self, sites: Iterable[str]) -> None:
        """Begin anew with these sites: a fresh engine runs their recipes. Earlier fallbacks stay counted."""
        for gauge in (self.drift_psi, self.drift_amax_ratio, self.drift_in_fallback):
            gauge.clear()
        for site in sites:
            self.drift_in_fallback.labels(site).set(0)
            self.drift_fallbacks.labels(site)

    def set_drift(self, sites: Iterable[SiteDrift]) -> None:
        """Record a judgement of the drift guard; what it could not judge yet keeps its last figure, or has none."""
        for drift in sites:
            if drift.psi is not None:
                self.drift_psi.labels(drift.site).set(drift.psi)
            if drift.amax_ratio is not None:
                self.drift_amax_ratio.labels(drift.site).set(drift.amax_ratio)
            self.drift_in_fallback.labels(drift.site).set(drift.in_fallback)
            self.drift_fallbacks.labels(drift.site).inc(drift.fell_back)

    def set_memory(self, memory: DeviceMemory) -> None:
        """Record a reading of the GPU's memory; an engine on a CPU sends none."""
        for kind in ("reserved", "used", "total"):
            self.gpu_memory.labels(kind).set(getattr(memory, kind))

    def exposition(self) -> bytes:
        """The page for Prometheus, in its text format."""
        return generate_latest(self.registry)


def padding(sizes: Sequence[int]) -> float:
    """Share of padding when rows of these sizes are padded to the longest: 1 - sum / (rows * longest)."""
    room = len(sizes) * max(sizes, default=0)
    return 1.0 - sum(sizes) / room if room else 0.0
