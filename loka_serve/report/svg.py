"""Charts as SVG text: no library, no script, no network. Every text that goes in is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FONT = "font-family:system-ui,sans-serif;font-size:11px"
INK, QUIET, GRID = "#1c2430", "#5c6b7e", "#e3e8ee"
PALETTE = ("#2364aa", "#d1495b", "#2a9d5c", "#e08e2b", "#7b4fa3", "#4a9fb5", "#8a5a3c", "#6b7280")
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 64.0, 16.0, 28.0, 44.0
LEGEND_ROW = 16.0


def escape(text: object) -> str:
    """Text that is safe between tags and inside quoted attributes."""
    return html.escape("".join(letter if letter.isprintable() else " " for letter in str(text)), quote=True)


def number(value: float) -> str:
    """A coordinate: two decimals are a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def compact(value: float) -> str:
    """A figure for a label: 0.0123, 4.56, 1,234."""
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


LEAST_LOG = 1e-300  # on a logarithmic axis; a few steps below it numbers have no digits left


@dataclass(frozen=True)
class Axis:
    """A scale from `low` to `high`; `log` for a logarithmic one, whose ends are positive."""

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, label: str, values: Sequence[float], log: bool = False, zero: bool = False) -> Axis:
        """One that holds these values with a little room; from 0 if `zero`. What no scale can show is left out."""
        shown = [value for value in values if math.isfinite(value) and (value >= LEAST_LOG or not log)]
        if not shown:
            return cls(label, 1.0 if log else 0.0, 10.0 if log else 1.0, log)
        low, high = min(shown), max(shown)
        if log:
            return cls(label, low / 1.25, high * 1.25, True)
        room = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
        return cls(label, 0.0 if zero and low >= 0 else low - room, high + room)

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`; what lies outside is put at the end."""
        if self.log:
            value, low, high = math.log(max(value, LEAST_LOG)), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Four to eight round values."""
        if self.log:
            steps: tuple[float, ...] = (1, 2, 5) if self.high / self.low < 200 else (1,)
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = max(1, len(exponents) // 8)
            marks = [step * 10.0**exponent for exponent in exponents[::every] for step in steps]
        else:
            rough = (self.high - self.low) / 5
            magnitude = 10.0 ** math.floor(math.log10(rough))
            step = next(step * magnitude for step in (1, 2, 2.5, 5, 10) if step * magnitude >= rough)
            marks = [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [mark for mark in marks if self.low <= mark <= self.high]


@dataclass
class Chart:
    """A chart with two axes. Methods add marks in data coordinates; `text()` is the SVG."""

    title: str
    x: Axis
    y: Axis
    width: float = 560.0
    height: float = 320.0
    _marks: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def line(self, name: str, points: Sequence[tuple[float, float]], color: str, dashed: bool = False) -> None:
        """A line through points, with a dot at each and a legend entry."""
        path = " ".join(f"{number(self._x(x))},{number(self._y(y))}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        for x, y in points:
            self._dot(x, y, color, 2.4, f"{name}: {self.x.label} {compact(x)}, {self.y.label} {compact(y)}")
        self._names[name] = color

    def dot(self, x: float, y: float, color: str, label: str = "", hint: str = "", radius: float = 4.0) -> None:
        """One point, with its label beside it; `hint` shows when the pointer rests on it."""
        self._dot(x, y, color, radius, hint or label)
        if label:
            right = self.x.place(x) < 0.6
            anchor, shift = ("start", 7) if right else ("end", -7)
            self._marks.append(caption(self._x(x) + shift, self._y(y) - 5, label, anchor, INK))

    def bar_between(self, x: float, low: float, high: float, color: str) -> None:
        """A vertical interval at x."""
        self._marks.append(
            f'<line x1="{number(self._x(x))}" x2="{number(self._x(x))}" y1="{number(self._y(low))}" '
            f'y2="{number(self._y(high))}" stroke="{color}" stroke-width="1.4"/>'
        )

    def rule(self, y: float, name: str, color: str = QUIET) -> None:
        """A dashed horizontal line with its name."""
        place = number(self._y(y))
        self._marks.append(
            f'<line x1="{number(MARGIN_LEFT)}" x2="{number(self.width - MARGIN_RIGHT)}" y1="{place}" y2="{place}" '
            f'stroke="{color}" stroke-dasharray="5 4"/>'
        )
        self._marks.append(caption(self.width - MARGIN_RIGHT, self._y(y) - 4, name, "end", color))

    def rule_at(self, x: float, name: str, color: str = QUIET) -> None:
        """A dashed vertical line with its name."""
        place = number(self._x(x))
        self._marks.append(
            f'<line x1="{place}" x2="{place}" y1="{number(MARGIN_TOP)}" y2="{number(self.height - MARGIN_BOTTOM)}" '
            f'stroke="{color}" stroke-dasharray="5 4"/>'
        )
        right = self.x.place(x) < 0.7
        anchor, shift = ("start", 5) if right else ("end", -5)
        self._marks.append(caption(self._x(x) + shift, MARGIN_TOP + 10, name, anchor, color))

    def name(self, text: str, color: str) -> None:
        """A legend entry."""
        self._names[text] = color

    def text(self) -> str:
        """The SVG element."""
        inside = self.width - MARGIN_LEFT - MARGIN_RIGHT
        height = self.height + LEGEND_ROW * len(_legend_rows(self._names, inside))
        body = [caption(MARGIN_LEFT, 16, self.title, "start", INK, bold=True), *self._axes(), *self._marks]
        body += _legend(self._names, MARGIN_LEFT, inside, self.height + 4)
        return document(self.width, height, body, self.title)

    def _axes(self) -> list[str]:
        left, right, bottom = MARGIN_LEFT, self.width - MARGIN_RIGHT, self.height - MARGIN_BOTTOM
        marks = []
        for tick in self.y.ticks():
            y = number(self._y(tick))
            marks.append(f'<line x1="{number(left)}" x2="{number(right)}" y1="{y}" y2="{y}" stroke="{GRID}"/>')
            marks.append(caption(left - 6, self._y(tick) + 4, compact(tick), "end", QUIET))
        for tick in self.x.ticks():
            x = number(self._x(tick))
            marks.append(f'<line x1="{x}" x2="{x}" y1="{number(MARGIN_TOP)}" y2="{number(bottom)}" stroke="{GRID}"/>')
            marks.append(caption(self._x(tick), bottom + 15, compact(tick), "middle", QUIET))
        marks.append(caption((left + right) / 2, bottom + 33, self.x.label, "middle", QUIET))
        middle = (MARGIN_TOP + bottom) / 2
        marks.append(
            f'<text x="14" y="{number(middle)}" transform="rotate(-90 14 {number(middle)})" text-anchor="middle" '
            f'fill="{QUIET}" style="{FONT}">{escape(self.y.label)}</text>'
        )
        return marks

    def _dot(self, x: float, y: float, color: str, radius: float, hint: str) -> None:
        self._marks.append(
            f'<circle cx="{number(self._x(x))}" cy="{number(self._y(y))}" r="{number(radius)}" fill="{color}">'
            f"<title>{escape(hint)}</title></circle>"
        )

    def _x(self, value: float) -> float:
        return MARGIN_LEFT + self.x.place(value) * (self.width - MARGIN_LEFT - MARGIN_RIGHT)

    def _y(self, value: float) -> float:
        return self.height - MARGIN_BOTTOM - self.y.place(value) * (self.height - MARGIN_TOP - MARGIN_BOTTOM)


@dataclass(frozen=True)
class Cell:
    """One cell of a map: a color, a short text and what the pointer shows."""

    color: str
    text: str
    hint: str


def cell_map(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Cell | None]]],
    width: float,
    legend: Mapping[str, str] | None = None,
) -> str:
    """A table of colored cells as SVG; None leaves a cell empty. `legend`: what colors mean, name -> color."""
    left, line = min(0.42 * width, 8.0 + 6.4 * max((len(name) for name, _ in rows), default=1)), 17.0
    cell_width = (width - left) / max(1, len(columns))
    body = [caption(0, 14, title, "start", INK, bold=True)]
    for index, column in enumerate(columns):
        body.append(caption(left + (index + 0.5) * cell_width, 34, column, "middle", QUIET))
    for position, (name, cells) in enumerate(rows):
        y = 42 + position * line
        body.append(caption(left - 6, y + 12, name, "end", INK))
        for index, cell in enumerate(cells):
            if cell is None:
                continue
            x = left + index * cell_width
            body.append(
                f'<rect x="{number(x)}" y="{number(y)}" width="{number(cell_width - 1)}" height="{number(line - 1)}" '
                f'fill="{cell.color}"><title>{escape(cell.hint)}</title></rect>'
            )
            ink = "#fff" if _is_dark(cell.color) else INK
            body.append(caption(x + cell_width / 2, y + 12, cell.text, "middle", ink))
    bottom = 46 + line * len(rows)
    body += _legend(legend or {}, 0.0, width, bottom + 12)
    return document(width, bottom + (LEGEND_ROW * len(_legend_rows(legend or {}, width))), body, title)


def document(width: float, height: float, body: Sequence[str], title: str) -> str:
    """A complete SVG element that scales with the page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" role="img" aria-label="{escape(title)}">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>'
    )


def shade(share: float) -> str:
    """A color from pale (0) to deep red (1)."""
    share = min(1.0, max(0.0, share))
    stops = ((247, 250, 252), (250, 209, 148), (200, 52, 60))
    low, high, inside = (stops[0], stops[1], 2 * share) if share < 0.5 else (stops[1], stops[2], 2 * share - 1)
    return "#" + "".join(f"{round(a + (b - a) * inside):02x}" for a, b in zip(low, high, strict=True))


def _is_dark(color: str) -> bool:
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def caption(x: float, y: float, text: str, anchor: str, color: str, bold: bool = False) -> str:
    """A text element; `anchor` is start, middle or end."""
    weight = ";font-weight:600" if bold else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" fill="{color}" style="{FONT}{weight}">'
        f"{escape(text)}</text>"
    )


def _legend(names: Mapping[str, str], left: float, width: float, top: float) -> list[str]:
    body = []
    for index, row in enumerate(_legend_rows(names, width)):
        y = top + LEGEND_ROW * index
        for shift, name, color in row:
            body.append(f'<rect x="{number(left + shift)}" y="{number(y - 8)}" width="9" height="9" fill="{color}"/>')
            body.append(caption(left + shift + 13, y, name, "start", INK))
    return body


def _legend_rows(names: Mapping[str, str], width: float) -> list[list[tuple[float, str, str]]]:
    rows: list[list[tuple[float, str, str]]] = []
    left = width
    for name, color in names.items():
        needed = 32 + 6.6 * len(name)
        if not rows or left + needed > width:
            rows.append([])
            left = 0.0
        rows[-1].append((left, name, color))
        left += needed
    return rows
