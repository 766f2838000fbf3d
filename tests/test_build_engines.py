"""`--engine tensorrt` and `--engine auto`: what is built, what is refused, and which engine is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loka_serve.build import EXIT_ERROR, main
from loka_serve.build_engines import Candidate, choose_engine, format_engines
from loka_serve.bundle import Bundle
from loka_serve.gate import GateResult
from tests.building import build_arguments


def candidate(engine: str, milliseconds: float, passed: bool) -> Candidate:
    gate = GateResult.__new__(GateResult)  # only these fields are looked at
    fields = {"top_k": 50, "top_k_overlap": 0.95 if passed else 0.5, "min_top_k_overlap": 0.8}
    for name, value in fields.items():
        object.__setattr__(gate, name, value)
    return Candidate(engine, milliseconds, gate)


def test_the_fastest_that_passes_is_kept() -> None:
    slow, fast = candidate("reference", 9.0, True), candidate("tensorrt", 3.0, True)
    failed, absent = candidate("hopper", 1.0, False), Candidate("hopper", reason="no GPU")
    assert choose_engine([slow, failed, fast]) == "tensorrt"
    assert choose_engine([slow, absent, fast]) == "tensorrt"
    assert choose_engine([slow, absent]) == "reference"
    assert choose_engine([failed, absent]) == "hopper"  # the bundle is then left as a rejected one


def test_every_engine_is_told_of_in_a_line() -> None:
    values = {
        "chosen": "tensorrt",
        "timed_on": "CPU, batches of 8",
        "engines": [one.to_dict() for one in (Candidate("hopper", reason="no GPU"), candidate("tensorrt", 3.21, True))],
    }
    assert format_engines(values) == [
        "hopper: does not run here: no GPU",
        "tensorrt: 3.21 ms a history, gate passed: top-50 overlap with BF16 0.950, kept",
        "timed on CPU, batches of 8",
    ]


def test_auto_builds_what_runs_here_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(build_arguments(tmp_path, "--engine", "auto", "--quiet")) == 0
    printed = capsys.readouterr().out
    bundle = Bundle.load(tmp_path / "bundle")  # checksums of what was added afterwards, too
    engines = json.loads((bundle.path / "engines.json").read_text())
    assert bundle.engine == engines["chosen"]
    by_name = {one["engine"]: one for one in engines["engines"]}
    assert set(by_name) == {"reference", "hopper", "tensorrt"}
    assert by_name["hopper"]["milliseconds_per_history"] is None
    assert "the hopper engine runs on a CUDA device" in by_name["hopper"]["reason"]
    times = {name: by_name[name]["milliseconds_per_history"] for name in ("reference", "tensorrt")}
    assert min(times.values()) > 0 and engines["chosen"] == min(times, key=lambda name: times[name])
    assert by_name["tensorrt"]["gate_passed"] and by_name["reference"]["gate_passed"]
    for name in times:
        assert f"{name}: " in printed
    page = (bundle.path / "report.html").read_text()
    assert "Engines" in page and f"{engines['chosen']} (kept)" in page and "runs on a CUDA device" in page
    assert [path.name for path in tmp_path.iterdir() if "engines" in path.name] == []  # the others' bundles are gone


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "vulkan"], "error: --engine vulkan: expected one of reference, hopper, tensorrt, auto"),
        (
            ["--engine", "tensorrt", "--recipe", "fp8_row"],
            "error: --recipe fp8_row: the tensorrt engine runs bf16, fp8_tensor, auto; experts then run fp8_block",
        ),
        (["--engine", "tensorrt", "--trt-runtime", "tensorrt"], "error: TensorRT "),
        (["--engine", "tensorrt", "--trt-runtime", "onnx"], "error: --trt-runtime: expected one of auto, tensorrt, "),
    ],
)
def test_what_cannot_be_built_is_said_first(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(build_arguments(tmp_path, *flags)) == EXIT_ERROR
    output, error = capsys.readouterr()
    assert error.startswith(message) and len(error.splitlines()) == 1 and not output
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("recipe", ["auto", "fp8_tensor"])
def test_sites_take_what_the_engine_runs(recipe: str, tmp_path: Path) -> None:
    flags = ("--engine", "tensorrt", "--recipe", recipe, "--quiet")
    assert main(build_arguments(tmp_path, *flags)) == 0
    recipes = Bundle.load(tmp_path / "bundle").plan.recipes
    experts = {recipe for site, recipe in recipes.items() if ".moe." in site and not site.endswith(".router")}
    dense = {recipe for site, recipe in recipes.items() if site.startswith("layers.") and ".moe." not in site}
    assert (experts, dense) == ({"fp8_block"}, {"fp8_tensor"})


def test_onnx_is_needed_by_that_engine_alone(tmp_path: Path) -> None:
    arguments = build_arguments(tmp_path, "--engine", "tensorrt", "--quiet")
    program = (
        f"import sys; sys.modules['onnx'] = None; from loka_serve.build import main; sys.exit(main({arguments!r}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    expected = "error: --engine tensorrt: ONNX is not installed: pip install 'loka-serve[onnxruntime]'\n"
    assert (result.returncode, result.stderr) == (EXIT_ERROR, expected)
