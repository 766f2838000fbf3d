"""The page: well formed, self-contained, escaped, and saying what it must on the first screen."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from loka_serve.report.content import gather
from loka_serve.report.page import render
from tests.report.evidence import comparison, dispatch, gate, probe, site

VOID = {"meta", "link", "br"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\x00&amp;'


class Checker(HTMLParser):
    """Collects tags, attributes and text, and insists that every element is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(**evidence: Any) -> Checker:
    report = gather("groceries", "hopper", evidence.pop("probe", probe()), evidence.pop("gate", gate()), **evidence)
    json.dumps(report, allow_nan=False)
    return Checker(render(report))


def test_the_first_screen_says_what_is_fp8_what_is_not_why_and_what_it_gained() -> None:
    text = page().text
    first = text[
        text.index("groceries; built") if "groceries; built" in text else 0 : text.index("Quality against BF16")
    ]
    for expected in (
        "built for the hopper engine; gate passed : top-50 overlap with BF16 of at least 0.9 asked for",
        "3 of 4 sites in 8 bits, 86% of all GEMM work",
        "0.960 top-50 overlap with BF16, 0.955 to 0.965",
        "0.65x GEMM weights: 64.0 KiB to 41.5 KiB",
        "dense linears 2 x fp8_row",
        "head: fp8_row: keeps 95.00% of the top codes, below 99%",
        "not timed here; by arithmetic alone (8 bits at twice the rate) GEMMs would run 1.75x as fast",
    ):
        assert expected in first
    assert "recall@10 0.2000 0.2010 change -0.0010 to +0.0030" in text


def test_every_plot_is_there() -> None:
    titles = [
        value for name, value in page(dispatch=dispatch(), comparison=comparison()).attributes if name == "aria-label"
    ]
    assert titles == [
        "Error by site and recipe: floored MERE; \u25cf runs",
        "Agreement against time",
        "Error against time (partly modelled)",
        "Speed by row bucket, fastest library of each",
        "Dispatch: library (color) and speedup over BF16, by rows",
        "Magnitudes of each site's inputs",
    ]


def test_without_measurements_it_says_so() -> None:
    found = page()
    titles = [value for name, value in found.attributes if name == "aria-label"]
    assert "Recipe of each site" in titles and not any("Dispatch" in str(title) for title in titles)
    assert "Speed by row bucket is not measured: no dispatch table" in found.text


def test_speed_is_the_measured_one_where_there_is_one() -> None:
    assert "1.50x speed over BF16, measured end to end: a GPU" in page(comparison=comparison()).text
    emulated = page(comparison={**comparison(), "emulated": True}).text
    assert "measured end to end" not in emulated and "not timed here" in emulated
    assert "2.00x speed of all GEMMs over BF16; 71% of it measured" in page(dispatch=dispatch()).text


def test_a_failed_gate_and_warnings_are_plain() -> None:
    text = page(gate=gate(passed=False, warnings=["too few histories"])).text
    assert "gate FAILED" in text and "What this evidence does not say too few histories" in text


def test_nothing_is_loaded_from_anywhere() -> None:
    found = page(dispatch=dispatch(), comparison=comparison())
    assert found.tags.isdisjoint({"script", "img", "iframe", "object", "embed", "base"})
    links = [value for name, value in found.attributes if name in ("href", "src", "xlink:href", "action", "data")]
    assert links == ["data:,"]
    text = render(gather("m", "hopper", probe(), gate()))
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"} and "@import" not in text


def test_what_comes_from_files_is_escaped() -> None:
    evidence = {"sites": [site(HOSTILE, reason=HOSTILE), site("b" + HOSTILE, "head", "bf16", reason=HOSTILE)]}
    evidence["mods"] = {"applied": [{"name": HOSTILE, "rewrites": 1}], "became_safe": {HOSTILE: [HOSTILE]}}
    table = dispatch()
    table["environment"]["gpu"] = HOSTILE
    table["entries"][0]["us"] = {HOSTILE: 4.0}
    compared = comparison()
    compared["timed_on"], compared["headings"], compared["table"][0][0] = HOSTILE, [HOSTILE, "ms"], HOSTILE
    compared["rows"][0]["recipe"] = HOSTILE
    quality = {HOSTILE: gate()["quality"]["recall@10"]}
    report = gather(HOSTILE, HOSTILE, evidence, gate(warnings=[HOSTILE], quality=quality), compared, table)
    found = Checker(render(report))
    assert found.tags.isdisjoint({"script", "img"})
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert HOSTILE.replace("\x00", " ") in "".join(found.words)


def test_a_model_without_a_quantized_site() -> None:
    evidence = {"sites": [site("heads.0", "head", "bf16", reason="a head stays high")]}
    text = page(probe=evidence).text
    assert "0 of 1 sites in 8 bits" in text and "No site runs in 8 bits." in text


@pytest.mark.parametrize("absmax", [0.0, None])
def test_a_site_without_inputs(absmax: float | None) -> None:
    lonely = site("layers.0.moe.down", "grouped", "bf16", (8, 64, 128), rows=0, reason="no calibration rows reached it")
    lonely["inputs"] = {"rows": 0, "absmax": absmax, "p99": None, "octaves": {}}
    lonely["errors"] = {}
    assert "no calibration rows reached it" in page(probe={"sites": [lonely]}).text
