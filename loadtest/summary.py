"""Figures of a load: percentiles, goodput, refusals, the generator's own lag; and their plot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.samples import Samples
from loka_serve.report.svg import PALETTE, Axis, Chart, document

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
NO_ANSWER = 0
CURVE = (0, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9, 99.95, 99.99, 100)
FEWEST_OF_A_SECOND = 5


def percentiles_ms(seconds: NDArray[np.float64]) -> dict[str, float | None]:
    """p50, p90, p99, p99.9, mean and max in milliseconds; each percentile is a latency that was seen."""
    if not len(seconds):
        return {**{f"p{percent:g}": None for percent in PERCENTILES}, "mean": None, "max": None}
    values = np.percentile(seconds * 1e3, PERCENTILES, method="higher")
    named = {f"p{percent:g}": round(float(value), 3) for percent, value in zip(PERCENTILES, values, strict=True)}
    return {**named, "mean": round(float(seconds.mean() * 1e3), 3), "max": round(float(seconds.max() * 1e3), 3)}


def summarize(samples: Samples, bound_ms: float | None = None) -> dict[str, Any]:
    """All figures of the counted part of a load, without its warm-up.

    `goodput` counts right answers within the bound (all right answers, if there is none); its share is of all requests
    that were due, so one that was refused or never answered is outside the bound. Lag is how late the generator sent.
    """
    load = samples.load
    counted = samples.rows[samples.rows["scheduled"] >= 0]
    latency = counted["done"] - counted["scheduled"]
    good = counted["right"] & (latency <= (np.inf if bound_ms is None else bound_ms / 1e3))
    refused = np.isin(counted["status"], (429, 503))
    statuses, counts = np.unique(counted["status"], return_counts=True)
    return {
        "url": load.url,
        "rate": load.rate,
        "seconds": load.seconds,
        "warmup_seconds": load.warmup_seconds,
        "processes": load.processes,
        "seed": load.seed,
        "requests": len(counted),
        "offered_per_s": round(len(counted) / load.seconds, 3),
        "statuses": {_status(status): int(count) for status, count in zip(statuses, counts, strict=True)},
        "right": int(counted["right"].sum()),
        "faults": dict(samples.faults.most_common()),
        "goodput": {
            "bound_ms": bound_ms,
            "per_s": round(int(good.sum()) / load.seconds, 3),
            "share": float(good.mean()) if len(counted) else 0.0,
        },
        "latency_ms": percentiles_ms(latency[counted["right"]]),
        "refused": {
            "requests": int(refused.sum()),
            "without_retry_after": int((refused & ~counted["retry_after"]).sum()),
            "latency_ms": percentiles_ms((counted["done"] - counted["sent"])[refused]),
        },
        "generator_lag_ms": percentiles_ms(counted["sent"] - counted["scheduled"]),
        "by_name": _by_name(samples, counted, latency, good),
        "timeline": timeline(samples),
    }


def _status(status: int) -> str:
    return "no answer" if status == NO_ANSWER else str(status)


def _by_name(
    samples: Samples, counted: NDArray[np.void], latency: NDArray[np.float64], good: NDArray[np.bool_]
) -> dict[str, Any]:
    names = np.array([template.name for template in samples.templates])
    if len(set(names.tolist())) == 1:
        return {}
    of_row = names[counted["template"]]
    return {
        name: {
            "requests": int((of_row == name).sum()),
            "right": int(counted["right"][of_row == name].sum()),
            "goodput_share": float(good[of_row == name].mean()),
            "latency_ms": percentiles_ms(latency[(of_row == name) & counted["right"]]),
        }
        for name in sorted(set(of_row.tolist()))
    }


def timeline(samples: Samples) -> list[dict[str, float | None]]:
    """Each second of the load by scheduled arrival: requests due, answered rightly, refused, p50 and p99 in ms."""
    rows, latency = samples.rows, samples.latency
    second = np.floor(rows["scheduled"]).astype(np.int64)
    seconds: list[dict[str, float | None]] = []
    for at in np.unique(second):
        here = second == at
        right = latency[here & rows["right"]] * 1e3
        shown = len(right) >= FEWEST_OF_A_SECOND
        seconds.append(
            {
                "second": int(at),
                "due": int(here.sum()),
                "right": len(right),
                "refused": int((here & np.isin(rows["status"], (429, 503))).sum()),
                "p50_ms": round(float(np.percentile(right, 50)), 3) if shown else None,
                "p99_ms": round(float(np.percentile(right, 99)), 3) if shown else None,
            }
        )
    return seconds


def draw(samples: Samples, bound_ms: float | None = None) -> str:
    """Two charts in one SVG: p50 and p99 of each second, and latency by percentile."""
    over_time, curve = _time_chart(samples, bound_ms), _percentile_chart(samples, bound_ms)
    height = over_time.height + 40
    shifted = f'<g transform="translate(0 {height})">{curve.text()}</g>'
    return document(over_time.width, 2 * height, [over_time.text(), shifted], "latency under an open loop")


def _time_chart(samples: Samples, bound_ms: float | None) -> Chart:
    seconds = [second for second in timeline(samples) if second["p50_ms"] is not None]
    points = {
        name: [(float(second["second"] or 0), float(second[f"{name}_ms"] or 0)) for second in seconds]
        for name in ("p50", "p99")
    }
    latencies = [value for line in points.values() for _, value in line] + ([bound_ms] if bound_ms else [])
    load = samples.load
    chart = Chart(
        f"latency at {load.rate:g} requests/s (Poisson), by second of arrival",
        Axis.over("second", [place for place, _ in points["p50"]]),
        Axis.over("latency, ms", latencies, log=True),
        width=720,
    )
    for (name, line), color in zip(points.items(), PALETTE, strict=False):
        chart.line(name, line, color)
    if bound_ms:
        chart.rule(bound_ms, f"bound {bound_ms:g} ms")
    return chart


def _percentile_chart(samples: Samples, bound_ms: float | None) -> Chart:
    counted = samples.rows[samples.rows["scheduled"] >= 0]
    right = (counted["done"] - counted["scheduled"])[counted["right"]] * 1e3
    shown = (
        [percent for percent in CURVE if (1 - percent / 100) * len(right) >= 1 or percent == 100] if len(right) else []
    )
    # Percentiles from the right: 90 is at 10, 99 at 100, 99.9 at 1,000; the slowest at the number of answers.
    places = [1 / max(1 - percent / 100, 1 / len(right)) for percent in shown]
    values = [float(np.percentile(right, percent, method="higher")) for percent in shown]
    chart = Chart(
        f"latency by percentile, {len(right)} right answers",
        Axis.over("one request in so many is slower", places, log=True),
        Axis.over("latency, ms", [*values, *([bound_ms] if bound_ms else [])], log=True),
        width=720,
    )
    chart.line("latency", list(zip(places, values, strict=True)), PALETTE[0])
    if bound_ms:
        chart.rule(bound_ms, f"bound {bound_ms:g} ms")
    return chart
