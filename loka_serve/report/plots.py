"""The report's plots, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loka_serve.report.content import RECIPES
from loka_serve.report.svg import INK, PALETTE, QUIET, Axis, Cell, Chart, caption, cell_map, compact, document, shade

Record = Mapping[str, Any]
WIDTH = 900.0
BOUND = 0.2
"""Floored MERE from which on a recipe is not chosen."""
MIN_SPEEDUP = 1.05
RECIPE_COLORS = dict(zip(RECIPES, ("#c3ccd6", "#e08e2b", "#2364aa", "#2a9d5c", "#7b4fa3"), strict=True))
HISTOGRAM_WIDTH, HISTOGRAM_HEIGHT, HISTOGRAMS_A_ROW = 225.0, 84.0, 4


def error_map(sites: Sequence[Record]) -> str:
    """Floored MERE of every recipe at every site; the recipe that runs is marked."""
    rows: list[tuple[str, list[Cell | None]]] = []
    for site in sites:
        cells: list[Cell | None] = []
        for recipe in RECIPES:
            error = site["errors"].get(recipe)
            cells.append(None if error is None else _error_cell(site, recipe, error))
        rows.append((site["name"], cells))
    return cell_map("Error by site and recipe: floored MERE; \u25cf runs", RECIPES, rows, WIDTH)


def _error_cell(site: Record, recipe: str, error: Record) -> Cell:
    mere, mark = error["floored_mere"], " \u25cf" if recipe == site["recipe"] else ""
    if mere is None:
        return Cell(shade(1.0), f"not finite{mark}", f"{site['name']}, {recipe}: the error is not finite")
    # From a BF16-like error (pale) to the bound (deep), by ratio.
    share = math.log(max(mere, 1e-6) / 0.004) / math.log(BOUND / 0.004)
    hint = f"{site['name']}, {recipe}: floored MERE {mere:.4f}"
    if error["relative_frobenius"] is not None:
        hint += f", relative Frobenius error {error['relative_frobenius']:.4f}"
    return Cell(shade(share), f"{mere:.3f}{mark}", f"{hint}; {site['reason']}" if mark else hint)


def histograms(sites: Sequence[Record]) -> str:
    """The inputs of each site: values by magnitude, with the 99th percentile and the largest."""
    shown = [site for site in sites if site["octaves"]]
    body: list[str] = []
    for index, site in enumerate(shown):
        row, column = divmod(index, HISTOGRAMS_A_ROW)
        body += _histogram(site, column * HISTOGRAM_WIDTH, row * HISTOGRAM_HEIGHT)
    rows = -(-len(shown) // HISTOGRAMS_A_ROW)
    return document(WIDTH, HISTOGRAM_HEIGHT * max(1, rows), body, "Magnitudes of each site's inputs")


def _histogram(site: Record, left: float, top: float) -> list[str]:
    counts = {int(octave): count for octave, count in site["octaves"].items()}
    # Below 2**-12 of the largest nothing reaches a code of E4M3 with one scale, zeros included: one bar stands for it.
    last = max(counts)
    first = last - 15
    bars = {octave: 0 for octave in range(first, last + 1)}
    for octave, count in counts.items():
        bars[max(first, octave)] += count
    most, step, base = max(bars.values()), (HISTOGRAM_WIDTH - 20) / len(bars), top + 66
    name = site["name"] if len(site["name"]) <= 34 else "\u2026" + site["name"][-33:]
    figures = f"absmax {_figure(site['absmax'])}, p99 {_figure(site['p99'])}"
    body = [caption(left, top + 12, name, "start", INK), caption(left, top + 79, figures, "start", QUIET)]
    p99_octave = math.floor(math.log2(site["p99"])) if site["p99"] else None
    for position, (octave, count) in enumerate(bars.items()):
        height = 48 * count / most
        color = PALETTE[0] if p99_octave is None or octave <= p99_octave else PALETTE[1]
        below = "below " if position == 0 else ""
        hint = label_of_octave(octave, below) + f": {count:,} values"
        body.append(
            f'<rect x="{left + position * step:.1f}" y="{base - height:.1f}" width="{step - 1:.1f}" '
            f'height="{max(height, 0.5 if count else 0.0):.1f}" fill="{color}"><title>{hint}</title></rect>'
        )
    return body


def label_of_octave(octave: int, below: str) -> str:
    """In words for a pointer: what a bar counts."""
    return (
        f"below {compact(2.0 ** (octave + 1))}"
        if below
        else f"{compact(2.0**octave)} to {compact(2.0 ** (octave + 1))}"
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else compact(value)


def speed_chart(speed: Record) -> str:
    """Speedup over BF16 by number of rows; sites of one shape and recipe share a line."""
    lines: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for site, cells in by_site(speed).items():
        points = tuple((float(cell["rows"]), cell["bf16_us"] / cell["us"]) for cell in cells if cell["bf16_us"])
        if points and cells[0]["recipe"] != "bf16":
            lines.setdefault(points, []).append(site)
    values = [point for points in lines for point in points]
    x = Axis.over("rows", [rows for rows, _ in values], log=True)
    y = Axis.over("speedup over BF16", [*(gain for _, gain in values), 1.0, MIN_SPEEDUP])
    chart = Chart("Speed by row bucket, fastest library of each", x, y, width=WIDTH, height=360)
    chart.rule(MIN_SPEEDUP, f"{MIN_SPEEDUP:g}x: below it BF16 is the better choice")
    for index, (points, names) in enumerate(lines.items()):
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
        chart.line(name, points, PALETTE[index % len(PALETTE)], dashed=index >= len(PALETTE))
    return chart.text()


def dispatch_map(speed: Record) -> str:
    """Which library runs each site at each number of rows, and its speedup over BF16."""
    buckets = sorted({cell["rows"] for cell in speed["cells"]})
    libraries = sorted({cell["library"] for cell in speed["cells"]})
    colors = {library: PALETTE[index % len(PALETTE)] for index, library in enumerate(libraries)}
    rows: list[tuple[str, list[Cell | None]]] = []
    for site, cells in by_site(speed).items():
        found = {cell["rows"]: cell for cell in cells}
        rows.append((site, [_dispatch_cell(found.get(bucket), colors) for bucket in buckets]))
    columns = [f"{bucket:,}" for bucket in buckets]
    return cell_map("Dispatch: library (color) and speedup over BF16, by rows", columns, rows, WIDTH, colors)


def _dispatch_cell(cell: Record | None, colors: Mapping[str, str]) -> Cell | None:
    if cell is None:
        return None
    gain = f"{cell['bf16_us'] / cell['us']:.2f}" if cell["bf16_us"] else ""
    hint = f"{cell['site']}, {cell['rows']:,} rows: {cell['recipe']} by {cell['library']}, {compact(cell['us'])} us"
    return Cell(colors[cell["library"]], gain, f"{hint}; BF16 {compact(cell['bf16_us'])} us" if gain else hint)


def plan_map(sites: Sequence[Record]) -> str:
    """In place of the dispatch map where nothing was timed: the recipe of each site."""
    rows = [(site["name"], [Cell(RECIPE_COLORS[site["recipe"]], site["recipe"], site["reason"])]) for site in sites]
    return cell_map("Recipe of each site", ["recipe"], rows, WIDTH / 2)


def frontier_chart(frontier: Record) -> str:
    """Error against time as site after site goes over to its recipe."""
    points = [(point["time"], point["error"]) for point in frontier["points"]]
    x = Axis.over("GEMM time, share of BF16's", [time for time, _ in points])
    y = Axis.over("added error (root of summed squares)", [error for _, error in points], zero=True)
    share = frontier["measured_share"]
    basis = "measured" if share > 0.999 else "partly modelled" if share else "modelled"
    chart = Chart(f"Error against time ({basis})", x, y, width=WIDTH, height=340)
    chart.line("sites in the order of time saved for their error", points, PALETTE[0])
    for point in frontier["points"]:
        chart.dot(point["time"], point["error"], PALETTE[0], hint=point["site"] or "all in BF16", radius=3)
    chart.dot(*points[0], INK, "all BF16")
    if len(points) > 1:
        chart.dot(*points[-1], PALETTE[1], "as built")
    return chart.text()


def comparison_chart(comparison: Record) -> str:
    """Overlap with BF16 against the time of a history, with 95 % intervals; only recipes whose time was measured."""
    timed = [row for row in comparison["rows"] if row["milliseconds_per_history"] is not None]
    x = Axis.over("ms a history", [row["milliseconds_per_history"] for row in timed])
    ends = [end for row in timed for end in row["gate"]["top_k_interval"]]
    y = Axis.over("top-K overlap with BF16", [*ends, 1.0])
    title = "Agreement against time" + (" (8 bits emulated)" if comparison["emulated"] else "")
    chart = Chart(title, x, y, width=WIDTH, height=340)
    for row in timed:
        recipe, time = row["recipe"], row["milliseconds_per_history"]
        color = INK if recipe == "auto" else RECIPE_COLORS.get(recipe, QUIET)
        low, high = row["gate"]["top_k_interval"]
        chart.bar_between(time, low, high, color)
        chart.dot(time, row["gate"]["top_k_overlap"], color, recipe)
    return chart.text()


def by_site(speed: Record) -> dict[str, list[Record]]:
    """The cells of each site, rows ascending."""
    found: dict[str, list[Record]] = {}
    for cell in speed["cells"]:
        found.setdefault(cell["site"], []).append(cell)
    return found
