"""The report as one page of HTML: no script, no network, every text of a file escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from loka_serve.probe.report import format_bytes
from loka_serve.report import plots
from loka_serve.report.svg import compact, escape

Record = Mapping[str, Any]
MOST_REASONS = 6

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#1c2430;background:#f4f6f8;margin:0}
main{max-width:960px;margin:0 auto;padding:20px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px}
.quiet{color:#5c6b7e}section{background:#fff;border:1px solid #e3e8ee;border-radius:8px;padding:14px 18px;margin:12px 0}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:12px 0}
.tile{background:#fff;border:1px solid #e3e8ee;border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px;line-height:1.3}.good{color:#1f7a48}.bad{color:#b3303d}
.two{display:grid;grid-template-columns:1fr 1fr;gap:12px}.two section{margin:0}
table{border-collapse:collapse;width:100%}th,td{padding:3px 8px;text-align:right;border-bottom:1px solid #e9edf1}
th:first-child,td:first-child,.text{text-align:left}th{font-weight:600;color:#5c6b7e}
ul{margin:6px 0;padding-left:18px}svg{max-width:100%;height:auto}
.wide{overflow-x:auto}.wide td{white-space:nowrap}.wide td.text{white-space:normal}
@media(max-width:720px){.tiles,.two{grid-template-columns:1fr 1fr}}
"""


def render(report: Record) -> str:
    """The page of a report from `loka_serve.report.content.gather`."""
    sections = [
        _head(report),
        _tiles(report),
        _what_and_why(report["summary"]),
        _warnings(report["gate"]),
        _quality(report["gate"]),
        _comparison(report["comparison"]),
        _engines(report["engines"]),
        _mods(report["mods"]),
        *_plots(report),
        _sites(report["sites"]),
    ]
    title = escape(f"{report['model']}: precision report")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Without an icon of its own the browser would ask the network for one.
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(report: Record) -> str:
    passed, gate = report["gate"]["passed"], report["gate"]
    word = '<span class="good">passed</span>' if passed else '<span class="bad">FAILED</span>'
    return (
        f"<h1>{escape(report['model'])}</h1>"
        f'<div class="quiet">built for the {escape(report["engine"])} engine; gate {word}: top-{gate["top_k"]} overlap '
        f"with BF16 of at least {gate['min_top_k_overlap']:g} asked for, {gate['rows']} held-out histories</div>"
    )


def _tiles(report: Record) -> str:
    summary, gate = report["summary"], report["gate"]
    ratio = summary["weight_bytes"] / summary["bf16_bytes"] if summary["bf16_bytes"] else 1.0
    tiles = [
        (
            f"{summary['quantized_sites']} of {summary['sites']}",
            f"sites in 8 bits, {summary['quantized_work_share']:.0%} of all GEMM work",
        ),
        (
            f"{gate['top_k_overlap']:.3f}",
            f"top-{gate['top_k']} overlap with BF16, {_interval(gate['top_k_interval'])}",
        ),
        (
            f"{ratio:.2f}x",
            f"GEMM weights: {format_bytes(summary['bf16_bytes'])} to {format_bytes(summary['weight_bytes'])}",
        ),
        _speed_tile(report),
    ]
    boxes = [f'<div class="tile"><b>{escape(figure)}</b>{escape(text)}</div>' for figure, text in tiles]
    return f'<div class="tiles">{"".join(boxes)}</div>'


def _speed_tile(report: Record) -> tuple[str, str]:
    """What quantization gained in time: measured end to end, else of GEMMs, else a model, and it says which."""
    comparison = report["comparison"]
    if comparison is not None and not comparison["emulated"]:
        times = {row["recipe"]: row["milliseconds_per_history"] for row in comparison["rows"]}
        ours, bf16 = times.get(comparison["chosen"]), times.get("bf16")
        if ours and bf16:
            return f"{bf16 / ours:.2f}x", f"speed over BF16, measured end to end: {comparison['timed_on']}"
    time, measured = report["frontier"]["points"][-1]["time"], report["frontier"]["measured_share"]
    if measured > 0:
        return f"{1 / time:.2f}x", f"speed of all GEMMs over BF16; {measured:.0%} of it measured, the rest modelled"
    return "not timed", f"here; by arithmetic alone (8 bits at twice the rate) GEMMs would run {1 / time:.2f}x as fast"


def _what_and_why(summary: Record) -> str:
    rows = [
        [entry["kind"], ", ".join(f"{count} x {recipe}" for recipe, count in entry["recipes"].items())]
        for entry in summary["by_kind"]
    ]
    worst = summary["largest_error"]
    note = (
        f"Largest floored MERE of a site in 8 bits: {worst['floored_mere']:.3f} at {worst['site']} "
        f"({worst['recipe']}); the bound is {plots.BOUND:g}."
        if worst
        else "No site runs in 8 bits."
    )
    reasons = Counter(f"{entry['kind']}: {entry['reason']}" for entry in summary["kept"])
    items = [
        f"<li>{escape(reason)}{f' ({count} sites)' if count > 1 else ''}</li>"
        for reason, count in reasons.most_common(MOST_REASONS)
    ]
    if len(reasons) > MOST_REASONS:
        items.append(f"<li>{len(reasons) - MOST_REASONS} more: see the sites below</li>")
    kept = f"<ul>{''.join(items)}</ul>" if items else "<p>Every GEMM runs in 8 bits.</p>"
    return (
        '<div class="two">'
        f"<section><b>What runs in what</b>{_table(['part', 'recipes'], rows, text=2)}"
        f'<p class="quiet">{escape(note)}</p></section>'
        f'<section><b>What stays BF16, and why</b>{kept}<p class="quiet">Embeddings and norms are no GEMMs and '
        "always stay.</p></section></div>"
    )


def _warnings(gate: Record) -> str:
    if not gate["warnings"]:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in gate["warnings"])
    return f"<section><b>What this evidence does not say</b><ul>{items}</ul></section>"


def _quality(gate: Record) -> str:
    rows = [["top-1 agreement", "", f"{gate['top_1_agreement']:.3f}", _interval(gate["top_1_interval"])]]
    rows.append([f"top-{gate['top_k']} overlap", "", f"{gate['top_k_overlap']:.3f}", _interval(gate["top_k_interval"])])
    for metric, value in gate["quality"].items():
        low, high = value["change_interval"]
        change = f"change {low:+.4f} to {high:+.4f}"
        rows.append([metric, f"{value['bf16']:.4f}", f"{value['quantized']:.4f}", change])
    calibration = gate["calibration"]
    errors = calibration["expected_calibration_error"]
    if errors["bf16"] is not None:
        name = "expected calibration error, top 1"
        rows.append([name, f"{errors['bf16']:.4f}", f"{errors['quantized']:.4f}", ""])
    for name, key in (
        ("mean score shift, nats", "score_shift_nats"),
        ("mean score distance, nats", "score_distance_nats"),
    ):
        if calibration[key] is not None:
            rows.append([name, "", f"{calibration[key]:+.4f}" if "shift" in key else f"{calibration[key]:.4f}", ""])
    headings = ["held-out histories", "BF16", "as built", "95 % interval"]
    return f"<section><b>Quality against BF16</b>{_table(headings, rows)}</section>"


def _comparison(comparison: Record | None) -> str:
    if comparison is None:
        return ""
    return (
        f'<section class="wide"><b>All recipes</b>{_table(comparison["headings"], comparison["table"])}'
        f'<p class="quiet">Time: {escape(comparison["timed_on"])}.</p></section>'
    )


def _engines(engines: Record | None) -> str:
    if engines is None:
        return ""
    rows = []
    for one in engines["engines"]:
        name = one["engine"] + (" (kept)" if one["engine"] == engines["chosen"] else "")
        if one["milliseconds_per_history"] is None:
            rows.append([name, "-", "-", "-", one["reason"]])
        else:
            gate = "passed" if one["gate_passed"] else "failed"
            rows.append([name, f"{one['milliseconds_per_history']:.3g}", gate, f"{one['top_k_overlap']:.3f}", ""])
    headings = ["engine", "ms a history", "gate", "overlap with BF16", "does not run here"]
    return (
        f'<section class="wide"><b>Engines</b>{_table(headings, rows)}'
        f'<p class="quiet">Time: {escape(engines["timed_on"])}.</p></section>'
    )


def _mods(mods: Record | None) -> str:
    applied = [] if mods is None else mods.get("applied", [])
    if not applied:
        return ""
    names = ", ".join(f"{mod['name']} ({mod['rewrites']} rewrites)" for mod in applied)
    safe = mods.get("became_safe", {}) if mods else {}
    items = "".join(f"<li>{escape(site)}: {escape(', '.join(recipes))}</li>" for site, recipes in safe.items())
    became = f"<p>Safe only through them:</p><ul>{items}</ul>" if items else ""
    return f"<section><b>Mods</b><p>{escape(names)}</p>{became}</section>"


def _plots(report: Record) -> list[str]:
    sites, speed, frontier = report["sites"], report["speed"], report["frontier"]
    found = [_figure(plots.error_map(sites))]
    if report["comparison"] and any(row["milliseconds_per_history"] for row in report["comparison"]["rows"]):
        found.append(_figure(plots.comparison_chart(report["comparison"])))
    note = (
        f"{frontier['measured_share']:.0%} of the time rests on measured speeds; the rest is modelled as twice BF16's "
        "rate. Errors of different sites are taken to be independent."
    )
    found.append(_figure(plots.frontier_chart(frontier), note))
    if speed["measured"]:
        where = ", ".join(f"{name} {value}" for name, value in speed["environment"].items() if value)
        found += [_figure(plots.speed_chart(speed), f"Measured on {where}."), _figure(plots.dispatch_map(speed))]
    else:
        note = f"Speed by row bucket is not measured: {speed['reason']}. In place of the dispatch map: the plan."
        found.append(_figure(plots.plan_map(sites), note))
    note = "Blue: up to the octave of the 99th percentile; red: beyond it. The first bar holds all that is smaller."
    found.append(
        "<section><b>Inputs of each site, by magnitude</b>" + plots.histograms(sites) + _note(note) + "</section>"
    )
    return found


def _sites(sites: Sequence[Record]) -> str:
    rows = [
        [
            site["name"],
            " x ".join(map(str, site["shape"])),
            site["recipe"],
            site["reason"],
            f"{site['rows']:,}",
            "-" if site["absmax"] is None else compact(site["absmax"]),
            f"{site['weight_bytes'] / site['bf16_bytes']:.2f}x",
        ]
        for site in sites
    ]
    headings = ["site", "weight", "recipe", "why", "rows seen", "absmax", "bytes"]
    return f'<section class="wide"><b>Every site</b>{_table(headings, rows, text=4)}</section>'


def _figure(svg: str, note: str = "") -> str:
    return f"<section>{svg}{_note(note) if note else ''}</section>"


def _note(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _table(headings: Sequence[object], rows: Sequence[Sequence[object]], text: int = 1) -> str:
    """A table whose first `text` columns are words."""

    def line(tag: str, cells: Sequence[object]) -> str:
        marked = [
            f"<{tag}{' class=text' if index < text else ''}>{escape(cell)}</{tag}>" for index, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(marked)}</tr>"

    return f"<table>{line('th', headings)}{''.join(line('td', row) for row in rows)}</table>"


def _interval(ends: Sequence[float]) -> str:
    return f"{ends[0]:.3f} to {ends[1]:.3f}"
