"""The report in a bundle: what the build leaves there, and the command that writes it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka_serve import build
from loka_serve.bundle import Bundle, add_files
from loka_serve.report.__main__ import main
from tests.building import build_arguments
from tests.report.evidence import dispatch


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert build.main(build_arguments(folder)) == 0
    return folder / "bundle"


def test_the_build_leaves_a_report(bundle: Path) -> None:
    loaded = Bundle.load(bundle)
    assert {"report.json", "report.html"} <= set(loaded.manifest["files"])
    report = json.loads((bundle / "report.json").read_text())
    assert report["gate"] == loaded.gate
    assert [site["name"] for site in report["sites"]] == list(loaded.plan.recipes)
    assert report["summary"]["quantized_sites"] == len(loaded.plan.quantized_sites)
    # Counted by magnitude: every value of every row that reached the site.
    qkv = next(site for site in report["sites"] if site["name"] == "layers.0.self_attention.qkv")
    assert sum(qkv["octaves"].values()) == qkv["rows"] * qkv["shape"][1] > 0
    assert f"<h1>{loaded.model_name}</h1>" in (bundle / "report.html").read_text()


def test_it_is_written_again_with_measured_speeds(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = dispatch()
    table["entries"] = [{**entry, "shape": {**entry["shape"], "n": 192, "k": 64}} for entry in table["entries"]]
    file = bundle.parent / "dispatch.json"
    file.write_text(json.dumps(table))
    assert main(["--bundle", str(bundle), "--dispatch", str(file)]) == 0
    assert capsys.readouterr().out == f"{bundle / 'report.html'}\n"
    Bundle.load(bundle)  # the manifest knows the new files
    speed = json.loads((bundle / "report.json").read_text())["speed"]
    assert {cell["site"] for cell in speed["cells"]} == {f"layers.{layer}.self_attention.qkv" for layer in range(3)}


def test_bad_input_is_one_line(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("error: ") and errors.count("\n") == 1
        return errors

    assert "not a bundle" in error("--bundle", str(tmp_path))
    broken = tmp_path / "dispatch.json"
    for content, message in (("{", "not readable as JSON"), ("[]", "expected a JSON object"), ("{}", "KeyError")):
        broken.write_text(content)
        assert message in error("--bundle", str(bundle), "--dispatch", str(broken))
    before = (bundle / "probe.json").read_bytes()
    add_files(bundle, {"probe.json": b'{"sites": [{"name": 3}]}'})
    assert "the evidence is not as the build writes it" in error("--bundle", str(bundle))
    add_files(bundle, {"probe.json": before})
