"""The compose file names what is there, and holds the promises of the README."""

from __future__ import annotations

from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTENT = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = CONTENT["services"]


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
