"""The compose file names what is there, and holds the promises of the README."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTENT = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = CONTENT["services"]


def check(content: dict[str, Any]) -> None:
    """As the Compose Specification says; `${NAME...}`, which compose fills in first, stands for a folder."""
    compose_spec = pytest.importorskip("compose_spec")
    text = re.sub(r"\$\{[^}]*\}", "/folder", json.dumps(content))
    compose_spec.PyCompose.from_json(text).validate()


def test_it_is_as_the_compose_specification_says() -> None:
    check(CONTENT)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop_grace_period", "soon", "duration"),
        ("ports", ["hello"], "port"),
        ("cap_dropped", ["ALL"], "cap_dropped"),
    ],
)
def test_the_specification_would_notice_a_mistake(field: str, value: Any, message: str) -> None:
    content = copy.deepcopy(CONTENT)
    content["services"]["loka-cpu"][field] = value
    with pytest.raises(ValueError, match=message):
        check(content)


def test_the_cache_is_the_servers_own_folder() -> None:
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    for name in ("loka-cpu", "loka-gpu"):
        assert SERVICES[name]["read_only"] and "cache:/home/loka/.cache" in SERVICES[name]["volumes"]
    # A new volume takes over the owner of the image's folder; without one it would be root's.
    assert dockerfile.count("--owner=10001 /home/loka/.cache") == dockerfile.count("USER 10001") == 2


def test_a_server_for_either_machine_and_what_watches_it() -> None:
    assert set(SERVICES) == {"loka-cpu", "loka-gpu", "prometheus", "grafana"}
    assert (SERVICES["loka-cpu"]["profiles"], SERVICES["loka-gpu"]["profiles"]) == (["cpu"], ["gpu"])
    (device,) = SERVICES["loka-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 1 and device["capabilities"] == ["gpu"]
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    for name in ("loka-cpu", "loka-gpu"):
        assert f"AS {SERVICES[name]['build']['target']}\n" in dockerfile


def test_what_is_mounted_is_there_and_named_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.rsplit(":", 2 if volume.endswith(":ro") else 1)[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("${"):
                assert source in CONTENT["volumes"], source


def test_nothing_listens_beyond_this_machine() -> None:
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_prometheus_scrapes_the_server_and_reads_the_alerts() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["loka:8000"]}]
    assert "loka" in SERVICES["loka-cpu"]["networks"]["default"]["aliases"]
    mounted = [volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]]
    assert set(settings["rule_files"]) <= set(mounted)
