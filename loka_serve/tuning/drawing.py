"""The frontier of latency and throughput as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from loka_serve.report.svg import INK, PALETTE, Axis, Chart
from loka_serve.tuning.load import Point
from loka_serve.tuning.sweep import Bounds, Tuning, frontier


def draw(tuning: Tuning, bounds: Bounds, title: str) -> str:
    """All points by beam, the frontier of each beam, the bound, and the chosen setting."""
    points = [*tuning.points, *tuning.confirmations]
    x = Axis.over("p99, ms", [*(point.p99_ms for point in points), bounds.p99_ms], log=True)
    y = Axis.over("requests/s", [0.0, *(point.requests_per_second for point in points)], zero=True)
    chart = Chart(title, x, y, width=720, height=380)
    for index, beam in enumerate(sorted({point.setting.beam_width for point in points}, reverse=True)):
        _draw_beam(chart, [point for point in tuning.points if point.setting.beam_width == beam], beam, index)
    for point in tuning.confirmations:
        chart.dot(point.p99_ms, point.requests_per_second, "#9aa6b2", hint=describe(point), radius=2.5)
    if tuning.confirmations:
        chart.name("arrivals at random times", "#9aa6b2")
    chart.rule_at(bounds.p99_ms, f"bound {bounds.p99_ms:g} ms")
    chosen, setting = tuning.chosen, tuning.chosen.setting
    label = f"chosen: batch {setting.max_batch}, delay {setting.max_delay_ms:g} ms, beam {setting.beam_width}"
    chart.dot(chosen.p99_ms, chosen.requests_per_second, INK, label, describe(chosen), radius=6)
    return chart.text()


def describe(point: Point) -> str:
    """One line on a point."""
    setting = point.setting
    return (
        f"batch {setting.max_batch}, delay {setting.max_delay_ms:g} ms, beam {setting.beam_width}, {point.load}: "
        f"p50 {point.p50_ms:.4g} ms, p99 {point.p99_ms:.4g} ms, {point.requests_per_second:.4g} requests/s, "
        f"mean batch {point.mean_batch:.3g}"
    )


def _draw_beam(chart: Chart, points: Sequence[Point], beam: int, index: int) -> None:
    color = PALETTE[index % len(PALETTE)]
    for point in points:
        chart.dot(point.p99_ms, point.requests_per_second, color, hint=describe(point), radius=3)
    edge = [(point.p99_ms, point.requests_per_second) for point in frontier(points)]
    if edge:
        chart.line(f"beam {beam}", edge, color)
