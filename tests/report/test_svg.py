"""Charts: scales, ticks, well-formed output."""

from __future__ import annotations

import math
import xml.etree.ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_serve.report.svg import Axis, Cell, Chart, cell_map, compact, escape, shade

SVG = "{http://www.w3.org/2000/svg}"


def test_places_on_an_axis() -> None:
    linear, log = Axis("x", 10.0, 20.0), Axis("x", 1.0, 100.0, log=True)
    assert [linear.place(value) for value in (10, 15, 20, 99, -1)] == [0, 0.5, 1, 1, 0]
    assert [log.place(value) for value in (1, 10, 100, 0)] == pytest.approx([0, 0.5, 1, 0])


def test_ticks_are_round() -> None:
    assert Axis("x", 0.0, 10.0).ticks() == [0, 2, 4, 6, 8, 10]
    assert Axis("x", 0.9, 11000.0, log=True).ticks() == [1, 10, 100, 1000, 10000]
    assert Axis("x", 0.9, 11.0, log=True).ticks() == [1, 2, 5, 10]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=5), st.booleans())
def test_any_values_fit_their_axis(values: list[float], log: bool) -> None:
    axis = Axis.over("x", values, log)
    assert axis.low < axis.high and math.isfinite(axis.low) and math.isfinite(axis.high)
    assert all(0 <= axis.place(value) <= 1 for value in values) and len(axis.ticks()) < 30


def test_an_axis_over_nothing() -> None:
    assert Axis.over("x", [math.nan, math.inf]) == Axis("x", 0.0, 1.0)
    assert Axis.over("x", [0.0, -1.0, 5e-324], log=True) == Axis("x", 1.0, 10.0, log=True)


def test_a_chart_puts_marks_where_they_belong() -> None:
    chart = Chart("t", Axis("x", 0.0, 10.0), Axis("y", 0.0, 1.0), width=180, height=172)
    chart.line("<a>", [(0.0, 0.0), (10.0, 1.0)], "#112233")
    chart.dot(5.0, 0.5, "#445566", "b & c")
    root = xml.etree.ElementTree.fromstring(chart.text())
    # Margins: 64 left, 16 right, 28 above, 44 below; 100 x 100 are left for the data.
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == "64,128 164,28"
    dots = [(circle.get("cx"), circle.get("cy")) for circle in root.iter(f"{SVG}circle")]
    assert dots == [("64", "128"), ("164", "28"), ("114", "78")]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "<a>" in words and "b & c" in words


def test_a_cell_map_has_a_hint_for_each_cell() -> None:
    rows = [("site", [Cell("#000000", "dark", "why <not>"), None])]
    root = xml.etree.ElementTree.fromstring(cell_map("t", ["a", "b"], rows, 200.0, {"library": "#ff0000"}))
    assert [title.text for title in root.iter(f"{SVG}title")] == ["why <not>"]
    dark = next(text for text in root.iter(f"{SVG}text") if text.text == "dark")
    assert dark.get("fill") == "#fff" and any(text.text == "library" for text in root.iter(f"{SVG}text"))


def test_figures_and_colors() -> None:
    assert [compact(value) for value in (0, 0.01234, 4.567, 1234.5, 1e-7, 3e9)] == [
        "0", "0.0123", "4.57", "1,234", "1.0e-07", "3.0e+09",
    ]  # fmt: skip
    assert (shade(0.0), shade(0.5), shade(1.0), shade(7.0)) == ("#f7fafc", "#fad194", "#c8343c", "#c8343c")
    assert escape('<a href="x">\x07&') == "&lt;a href=&quot;x&quot;&gt; &amp;"
