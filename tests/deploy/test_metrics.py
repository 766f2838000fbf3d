"""Dashboards, alerts and autoscalers ask for metrics that the server has, with labels and values that it gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.grafana.make_dashboard import DASHBOARD, render
from deploy.grafana.panels import ROWS
from loka_serve.engines.base import SiteDrift
from loka_serve.server.messages import DeviceMemory
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.recommend import OUTCOMES

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"\b(?:loka|process|python)_[a-z0-9_]+")
OUTCOME = re.compile(r'outcome=~?"([a-z_|]+)"')


def exposed() -> set[str]:
    """Every name that /metrics may show."""
    metrics = ServerMetrics()
    metrics.expect("/v1/recommend", OUTCOMES)
    metrics.set_catalog("v1", 1)
    metrics.set_dispatch("measured", "no_file")
    metrics.set_drift([SiteDrift("heads.0", 0.1, 1.0, False)])
    metrics.set_memory(DeviceMemory(1, 2, 3))
    metrics.batch_started([3], [8])
    metrics.batch_finished({"total": 0.1})
    names = set()
    for family in metrics.registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def queries() -> Iterator[tuple[str, str]]:
    for row, panels in ROWS.items():
        for panel in panels:
            for expression, _ in panel.queries:
                yield f"{row}: {panel.title}", expression
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "autoscaling" / "prometheus-adapter-values.yaml").read_text())
    for rule in adapter["rules"]["custom"]:
        yield "prometheus-adapter", rule["seriesQuery"]
        yield "prometheus-adapter", rule["metricsQuery"]
    scaler = yaml.safe_load((DEPLOY / "kubernetes" / "autoscaling" / "autoscaler.yaml").read_text())
    for metric in scaler["spec"]["metrics"]:
        yield "autoscaler", metric["pods"]["metric"]["name"]


@pytest.mark.parametrize(("where", "expression"), list(queries()), ids=lambda value: value[:40])
def test_every_query_names_what_the_server_exposes(where: str, expression: str) -> None:
    names = set(NAME.findall(expression))
    assert names or expression.startswith("up{"), where
    assert names <= exposed(), where
    for outcomes in OUTCOME.findall(expression):
        assert set(outcomes.split("|")) <= set(OUTCOMES), where


@pytest.mark.parametrize(("where", "expression"), list(queries()), ids=lambda value: value[:40])
def test_every_query_is_promql(where: str, expression: str) -> None:
    parser = pytest.importorskip("promql_parser")
    filled = expression.replace("$__rate_interval", "1m").replace("<<.LabelMatchers>>", 'pod="p"')
    assert parser.parse(filled) is not None
    with pytest.raises(ValueError):
        parser.parse(filled + ")")


def test_a_query_for_something_else_would_be_noticed() -> None:
    assert not set(NAME.findall("rate(loka_requests_seen_total[5m])")) <= exposed()
    assert "loka_requests_total" in exposed() and "loka_request_seconds_bucket" in exposed()


def test_the_dashboard_on_file_is_that_of_the_panels() -> None:
    assert DASHBOARD.read_text() == render(), "run python -m deploy.grafana.make_dashboard"
    text = DASHBOARD.read_text()
    for needed in ("request_seconds", "queue_seconds", "batch_size", "padding_ratio", "beam_width", "short_answers"):
        assert f"loka_{needed}" in text
