"""The site table and probe.json."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from loka_serve.probe.choose import Choice
from loka_serve.probe.cost import ModelCost
from loka_serve.probe.errors import OutputError
from loka_serve.probe.measure import RecipeError
from loka_serve.probe.report import (
    GroupReport,
    SiteReport,
    costliest_sites,
    format_bytes,
    format_table,
    weight_bytes_ratio,
)
from loka_serve.probe.statistics import Summary


def site(name: str, recipe: str, frobenius: float, shape: tuple[int, ...] = (64, 32)) -> SiteReport:
    error = RecipeError(OutputError(frobenius, math.inf, 9.0, 2 * frobenius))
    inputs, weight = Summary(100, 4.5, 2.25, 0.0, 1.0), Summary(64, 0.5, 0.25, 0.0, 0.01)
    stored = math.prod(shape) * (2 if recipe == "bf16" else 1)
    return SiteReport(
        name, "linear", shape, inputs, weight, (GroupReport(3, 1.5),), {recipe: error}, Choice(recipe, "why"), stored
    )


SITES = [site("heads.0", "bf16", 0.002), site("a", "fp8_row", 0.03), site("b", "fp8_block", 0.05, (2, 8, 32))]


def test_bytes_count_quantized_sites_only() -> None:
    assert weight_bytes_ratio(SITES) == (64 * 32 + 512) / (2 * 64 * 32 + 2 * 512)
    assert math.isnan(weight_bytes_ratio(SITES[:1]))


def test_costliest_sites() -> None:
    assert [site.name for site in costliest_sites(SITES, 5)] == ["b", "a"]
    assert [site.name for site in costliest_sites(SITES, 1)] == ["b"]


def test_costliest_for_the_model_where_that_was_measured() -> None:
    costs = {name: ModelCost("fp8_row", 4, kl, (kl, kl), 10, 1.0) for name, kl in (("a", 0.2), ("b", 0.1))}
    measured = [replace(site, cost=costs.get(site.name)) for site in SITES]
    assert [site.name for site in costliest_sites(measured, 5)] == ["a", "b"]
    # Figures of some sites only cannot be ranked with those of others.
    assert [site.name for site in costliest_sites([measured[1], SITES[2]], 5)] == ["b", "a"]


def test_table_has_one_row_a_site() -> None:
    lines = format_table(SITES).splitlines()
    assert " ".join(lines[0].split()) == "site weight recipe MERE Frobenius absmax p99 bf16 -> stored"
    assert len(lines) == 2 + len(SITES)
    assert " ".join(lines[4].split()) == "b 2 x 8 x 32 fp8_block 0.1000 0.0500 4.5 2.25 1.0 KiB 512 B"


def test_json_has_no_infinity() -> None:
    values = json.loads(json.dumps(SITES[1].to_dict(), allow_nan=False))
    assert values["errors"]["fp8_row"]["output"]["sqnr_db"] is None
    assert values["errors"]["fp8_row"]["output"]["relative_frobenius"] == 0.03
    assert values["choice"] == {"recipe": "fp8_row", "reason": "why"}
    assert values["shape"] == [64, 32] and values["bf16_bytes"] == 4096 and values["groups"][0]["rows"] == 3


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.00 GiB")])
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
