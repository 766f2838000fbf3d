"""The manifests fit Kubernetes' schemas, each other, and the server."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from loka_serve.config import ServerConfig
from loka_serve.settings import variable_of

kubernetes_validate = pytest.importorskip("kubernetes_validate")

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.35"
NAME = {"app.kubernetes.io/name": "loka-serve"}
GENERATORS = ("Kustomization", "Component")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def manifests() -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path in sorted(FOLDER.rglob("*.yaml")):
        if path.stem in ("prometheus-adapter-values",) or path.stem.endswith("-patch"):
            continue
        found += [(path, document) for document in documents(path) if document["kind"] not in GENERATORS]
    return found


def with_labels(manifest: dict[str, Any]) -> dict[str, Any]:
    """As kustomize's `labels` with `includeSelectors` completes it."""
    manifest = copy.deepcopy(manifest)
    spec = manifest.setdefault("spec", {})
    if manifest["kind"] == "Deployment":
        spec.setdefault("selector", {}).setdefault("matchLabels", {}).update(NAME)
        spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(NAME)
    return manifest


def deployment() -> dict[str, Any]:
    (found,) = documents(FOLDER / "base" / "deployment.yaml")
    return found


@pytest.mark.parametrize(("path", "manifest"), manifests(), ids=lambda value: getattr(value, "stem", "manifest"))
def test_every_manifest_fits_the_schema(path: Path, manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(with_labels(manifest), VERSION, strict=True)


def test_the_schema_would_notice_a_typing_error() -> None:
    broken = with_labels(deployment())
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def test_every_file_is_part_of_a_kustomization_and_is_there() -> None:
    used = set()
    for path in FOLDER.rglob("kustomization.yaml"):
        (content,) = documents(path)
        assert content["kind"] in GENERATORS
        named = [*content.get("resources", []), *content.get("components", [])]
        named += [patch["path"] for patch in content.get("patches", []) if "path" in patch]
        named += [file for generator in content.get("configMapGenerator", []) for file in generator["files"]]
        for name in named:
            target = (path.parent / name).resolve()
            assert target.exists(), f"{path}: {name}"
            used.add(target)
    single = {path for path in FOLDER.rglob("*") if path.is_file() and path.name != "kustomization.yaml"}
    assert {path.name for path in single - used} == {"prometheus-adapter-values.yaml"}


def test_one_gpu_of_a_hopper_node_a_pod() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    assert expression["key"] == "nvidia.com/gpu.product" and expression["operator"] == "In"
    assert all(any(name in value for name in ("H100", "H200", "GH200", "H20")) for value in expression["values"])


def test_probes_and_grace_fit_the_server() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = {entry["name"]: entry["value"] for entry in container["env"]}
    fields = {variable_of(name) for name in ServerConfig.__dataclass_fields__}
    assert set(settings) <= fields
    drain, start = float(settings["LOKA_DRAIN_TIMEOUT_S"]), float(settings["LOKA_ENGINE_START_TIMEOUT_S"])
    assert pod["terminationGracePeriodSeconds"] >= container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain + 5
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > start
    assert startup["httpGet"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"


def test_the_autoscaler_and_the_budget_are_of_this_deployment() -> None:
    (scaler,) = documents(FOLDER / "autoscaling" / "autoscaler.yaml")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment()["metadata"]["name"])
    (budget,) = documents(FOLDER / "base" / "disruption-budget.yaml")
    assert budget["spec"]["maxUnavailable"] == 1 and deployment()["spec"]["replicas"] >= 2
