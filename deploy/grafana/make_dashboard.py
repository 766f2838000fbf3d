"""Writes the Grafana dashboard, so that a panel is one line here and not forty of JSON.

python -m deploy.grafana.make_dashboard [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deploy.grafana.panels import ROWS, Panel

DASHBOARD = Path(__file__).parent / "dashboards" / "loka-serve.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8


def render_panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """One panel in Grafana's form."""
    instant = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": expression,
            "legendFormat": legend,
            "datasource": DATASOURCE,
            **({"instant": True, "range": False, "format": "table"} if instant else {}),
        }
        for index, (expression, legend) in enumerate(panel.queries)
    ]
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.about} if panel.about else {}),
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT if panel.kind != "stat" else 4, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
        **panel.extra,
    }


def render_panels() -> list[dict[str, Any]]:
    """Rows of panels, from left to right as far as there is room."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        x, y, height = 0, y + 1, 0
        for panel in members:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(render_panel(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panels[-1]["gridPos"]["h"])
        y += height
    return panels


def render() -> str:
    """The whole dashboard as JSON text."""
    instance = {
        "name": "instance",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(loka_build_info, instance)", "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    source = {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "Prometheus", "value": "prometheus"},
    }
    dashboard = {
        "uid": "loka-serve",
        "title": "loka-serve",
        "tags": ["loka-serve"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, instance]},
        "panels": render_panels(),
    }
    return json.dumps(dashboard, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if the dashboard on file is another")
    if not parser.parse_args().check:
        DASHBOARD.write_text(render())
    elif DASHBOARD.read_text() != render():
        sys.exit(f"{DASHBOARD} is another: run python -m deploy.grafana.make_dashboard")


if __name__ == "__main__":
    main()
