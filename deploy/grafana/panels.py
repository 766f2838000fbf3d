"""What the dashboard shows: rows of panels, each a title and its PromQL. `make_dashboard` turns them into JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WHERE = 'instance=~"$instance"'
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """A chart: queries (PromQL, legend) and the unit of its axis, as Grafana names it.

    `kind`: timeseries, stat or table.
    """

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def rate(metric: str, by: str = "", matchers: str = "") -> str:
    """Events a second over all chosen servers."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{{{_matchers(matchers)}}}[{RATE}]))"


def quantile(share: float, histogram: str, by: str = "", matchers: str = "") -> str:
    """A quantile of a histogram over all chosen servers."""
    group = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({group}) (rate({histogram}_bucket{{{_matchers(matchers)}}}[{RATE}])))"


def quantiles(histogram: str, matchers: str = "") -> list[tuple[str, str]]:
    return [(quantile(share, histogram, matchers=matchers), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99)]


def mean(histogram: str, by: str = "") -> str:
    """Mean of a histogram's observations."""
    return f"{rate(histogram + '_sum', by)} / {rate(histogram + '_count', by)}"


def gauge(metric: str, function: str = "sum", by: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"{function}{group} ({metric}{{{WHERE}}})"


def _matchers(more: str) -> str:
    return f"{WHERE}, {more}" if more else WHERE


def increase(metric: str, window: str, by: str = "") -> str:
    """Events within a window over all chosen servers."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (increase({metric}{{{WHERE}}}[{window}]))"


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


RECOMMEND = 'route="/v1/recommend"'
STAGES = ("loka_engine_seconds", "stage", 'stage!="total"')
BY_STAGE = "{{stage}}"
FAILED = rate("loka_http_responses_total", "status", 'status!~"2.."')
REFUSED = 'outcome=~"queue_full|deadline|unavailable|cancelled"'
NAMED = {"options": {"textMode": "name"}}

REQUESTS = [
    Panel("Recommendations a second, by outcome", [(rate("loka_requests_total", "outcome"), "{{outcome}}")], "reqps",
          stacked=True),
    Panel("Latency of POST /v1/recommend", quantiles("loka_request_seconds", RECOMMEND), "s"),
    Panel("HTTP answers other than 2xx, of all",
          [(f"{FAILED} / ignoring(status) group_left {rate('loka_http_responses_total')}", "{{status}}")],
          "percentunit", stacked=True),
    Panel("Engines up", [(gauge("loka_engine_up"), "")], kind="stat", width=4),
    Panel("Catalog", [(gauge("loka_catalog_info", "max", "version"), "{{version}}")], kind="stat", extra=NAMED,
          about="The live version; two of them while servers differ."),
    Panel("Items of the catalog", [(gauge("loka_catalog_items", "max"), "")], kind="stat", width=4),
    Panel("Version", [(gauge("loka_build_info", "count", "version"), "{{version}}")], kind="stat", width=4,
          extra=NAMED),
    Panel("Engine restarts, last hour", [(increase("loka_engine_restarts_total", "1h"), "")], kind="stat", width=4),
]  # fmt: skip

TIMES = [
    Panel("p50 by stage of a batch", [(quantile(0.5, *STAGES), BY_STAGE)], "s"),
    Panel("p95 by stage of a batch", [(quantile(0.95, *STAGES), BY_STAGE)], "s"),
    Panel("p99 by stage of a batch", [(quantile(0.99, *STAGES), BY_STAGE)], "s"),
    Panel("Time in the queue", quantiles("loka_queue_seconds"), "s"),
    Panel("Time of a whole batch", quantiles("loka_engine_seconds", 'stage="total"'), "s"),
    Panel("Seconds of each stage in a second", [(rate("loka_engine_seconds_sum", "stage", 'stage!="total"'), BY_STAGE)],
          "percentunit", stacked=True, about="Stages of different batches overlap, so the sum may exceed 1."),
]  # fmt: skip

BATCHES = [
    Panel("Waiting and at work",
          [(gauge("loka_queue_depth"), "requests that wait"), (gauge("loka_requests_in_flight"), "HTTP requests"),
           (gauge("loka_batches_in_flight"), "batches at the engine")]),
    Panel("Batch size", [(mean("loka_batch_size"), "mean"), *quantiles("loka_batch_size")[:2]]),
    Panel("Batches a second", [(rate("loka_batch_size_count"), "batches")], "ops"),
    Panel("Padding, mean share", [(mean("loka_padding_ratio", "dimension"), "{{dimension}}")], "percentunit"),
    Panel("Beams of a request", [(mean("loka_beam_width"), "mean"), *quantiles("loka_beam_width")[:2]]),
    Panel("Refused, late or given up, by outcome",
          [(rate("loka_requests_total", "outcome", REFUSED), "{{outcome}}")], "reqps"),
]  # fmt: skip

ANSWERS = [
    Panel("Invalid answers a second, by reason", [(rate("loka_invalid_answers_total", "reason"), "{{reason}}")], "ops",
          about="The engine's answers that were refused: not a number, an ID that must not be there, an exception."),
    Panel("Short answers, of all right ones",
          [(share(rate("loka_short_answers_total"), rate("loka_requests_total", matchers='outcome="ok"')), "short")],
          "percentunit", about="Fewer items than asked for, as no more exist under the request's filter."),
    Panel("Items a second",
          [(rate("loka_items_total"), "returned"), (rate("loka_unknown_items_total"), "unknown in histories")], "ops"),
    Panel("Drift: PSI, the largest sites", [(f"topk(8, {gauge('loka_drift_psi', 'max', 'site')})", "{{site}}")],
          about="Population stability index of a site's inputs against calibration's."),
    Panel("Drift: largest input over calibration's",
          [(f"topk(8, {gauge('loka_drift_amax_ratio', 'max', 'site')})", "{{site}}")]),
    Panel("Sites in BF16 because of drift",
          [(gauge("loka_drift_site_in_fallback"), "now"),
           (increase("loka_drift_fallbacks_total", "1h"), "fallbacks within the hour")]),
]  # fmt: skip

PROCESSES = [
    Panel("GPU memory", [(gauge("loka_gpu_memory_bytes", "max", "instance, kind"), "{{instance}} {{kind}}")], "bytes",
          about="Reserved by the engine, used by all processes, total. Nothing on a CPU."),
    Panel("Dispatch: where each engine's table is from",
          [(gauge("loka_dispatch_info", "max", "instance, source, reason_class"), "")], kind="table",
          about="source=defaults is a fallback; reason_class says why no table was loaded."),
    Panel("Catalog updates within the hour, by outcome",
          [(increase("loka_catalog_swaps_total", "1h", "outcome"), "{{outcome}}")]),
    Panel("Memory of the API process", [(gauge("process_resident_memory_bytes", "max", "instance"), "{{instance}}")],
          "bytes"),
    Panel("CPU of the API process", [(rate("process_cpu_seconds_total", "instance"), "{{instance}}")], "percentunit"),
    Panel("Refused keys a second, by reason", [(rate("loka_refused_keys_total", "reason"), "{{reason}}")], "ops"),
]  # fmt: skip

ROWS: dict[str, list[Panel]] = {
    "Requests": REQUESTS,
    "Time by stage": TIMES,
    "Queue and batches": BATCHES,
    "Answers": ANSWERS,
    "Engine, catalog, processes": PROCESSES,
}
