"""`python -m loka_serve.build` end to end: recipes, the gate, bad input, interruption, memory."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loka_serve.build import EXIT_ERROR, EXIT_GATE, check_hopper, main
from loka_serve.bundle import Bundle
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.support import check_limits
from loka_serve.errors import EngineError
from loka_serve.models.config import PRESETS
from tests.building import build_arguments, write_checkpoint, write_histories


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    build_arguments(folder)
    return folder


def build(folder: Path, out: Path, *more: str) -> int:
    arguments = build_arguments(folder, *more)
    arguments[arguments.index("--out") + 1] = str(out)
    return main(arguments)


def test_auto_end_to_end(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(folder, tmp_path / "bundle") == 0
    output, errors = capsys.readouterr()
    # No progress bars where nobody watches, but a word on so few histories.
    assert errors.startswith("warning: 8 held-out histories are too few")
    assert all(line.startswith("warning: ") for line in errors.splitlines())
    bundle = Bundle.load(tmp_path / "bundle")
    for site, recipe in bundle.plan.recipes.items():
        row = next(line for line in output.splitlines() if line.startswith(f"{site} "))
        assert f" {recipe} " in row
        if ".router" in site or site.startswith("heads."):
            assert recipe == "bf16"  # random weights: near ties everywhere
        else:
            assert recipe == ("fp8_block" if re.search(r"moe\.(gate_up|down)$", site) else "fp8_row")
    summary = output.splitlines()[-1]
    assert summary.startswith(f"{tmp_path / 'bundle'}: 23 of 28 sites quantized") and "gate passed" in summary
    ratio = re.search(r"\((0\.\d+)x\)", summary)
    assert ratio is not None and 0.5 < float(ratio[1]) < 0.55


def test_the_probe_is_in_the_bundle(folder: Path, tmp_path: Path) -> None:
    assert build(folder, tmp_path / "bundle") == 0
    probe = Bundle.load(tmp_path / "bundle").probe
    sites = {site["name"]: site for site in probe["sites"]}
    assert probe["calibration_rows"] == 8
    down = sites["layers.1.moe.down"]
    assert down["kind"] == "grouped" and down["shape"] == [8, 64, 64] and down["choice"]["recipe"] == "fp8_block"
    assert set(down["errors"]) == {"bf16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row"}
    assert 0.02 < down["errors"]["fp8_block"]["output"]["relative_frobenius"] < 0.05
    assert len(down["groups"]) == 8 and sum(group["rows"] for group in down["groups"]) == down["inputs"]["rows"] > 0
    assert max(group["absmax"] for group in down["groups"]) == down["inputs"]["absmax"]
    assert 0 < down["inputs"]["p99"] < down["inputs"]["absmax"] and down["inputs"]["variance"] > 0
    # Initialised as N(0, 1 / in): the weight's statistics say so.
    assert down["weight"]["variance"] == pytest.approx(1 / 64, rel=0.05)
    assert down["weight"]["p99"] == pytest.approx(2.576 / 8, rel=0.05)
    assert sites["heads.0"]["errors"]["fp8_row"]["logits"]["kl_divergence"] > 0
    assert down["inputs"]["kurtosis"] > 1 and down["weight"]["kurtosis"] == pytest.approx(3, abs=0.1)
    assert all(group["weight_kurtosis"] == pytest.approx(3, abs=0.3) for group in down["groups"])
    synthetic = down["synthetic"]
    assert synthetic["pairs"] == 2 and set(synthetic["errors"]) == set(down["errors"])
    frobenius = synthetic["errors"]["fp8_block"]["relative_frobenius"]
    assert frobenius["low"] < frobenius["mean"] < frobenius["high"] and 0.02 < frobenius["mean"] < 0.05
    cost = down["cost"]
    assert (cost["recipe"], cost["histories"], len(cost["kl_by_level"])) == ("fp8_block", 2, 3)
    assert cost["kl_divergence"] > 0 and 0 <= cost["top_k_overlap"] <= 1
    assert 0.5 < sites["layers.1.moe.router"]["errors"]["fp8_row"]["routing"] <= 1


def test_the_long_parts_of_the_probe_can_be_left_out(folder: Path, tmp_path: Path) -> None:
    assert build(folder, tmp_path / "bundle", "--probe-pairs", "0", "--probe-cost-rows", "0") == 0
    sites = Bundle.load(tmp_path / "bundle").probe["sites"]
    assert all(site["synthetic"] is None and site["cost"] is None and site["errors"] for site in sites)


def test_sites_see_what_they_did_whatever_is_measured_beside(folder: Path, tmp_path: Path) -> None:
    """Mods and covariances calibrate anew, on the same rows: neither changes what is chosen."""
    choices = []
    for name, more in (("with", ()), ("without", ("--probe-pairs", "0", "--probe-cost-rows", "0"))):
        assert build(folder, tmp_path / name, *more) == 0
        choices.append([(site["inputs"], site["choice"]) for site in Bundle.load(tmp_path / name).probe["sites"]])
    assert choices[0] == choices[1]


@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row", "fp8_block", "int8_row"])
def test_a_recipe_asked_for(folder: Path, tmp_path: Path, recipe: str) -> None:
    assert build(folder, tmp_path / "bundle", "--recipe", recipe) == 0
    bundle = Bundle.load(tmp_path / "bundle")
    high = {site for site, used in bundle.plan.recipes.items() if used == "bf16"}
    assert high == {site for site in bundle.plan.recipes if ".router" in site or site.startswith("heads.")}
    assert set(bundle.plan.recipes.values()) == {"bf16", recipe}
    if recipe == "fp8_tensor":  # the static scale is calibration's amax over 448
        inputs = {site["name"]: site["inputs"] for site in bundle.probe["sites"]}
        scales = load_file(tmp_path / "bundle" / "weights-f32-00001.safetensors")
        scale = scales["layers.0.mlp.down.input_scale"].item()
        assert scale == pytest.approx(inputs["layers.0.mlp.down"]["absmax"] / 448, rel=1e-6)


def test_bf16_agrees_with_itself(folder: Path, tmp_path: Path) -> None:
    assert build(folder, tmp_path / "bundle", "--recipe", "bf16", "--min-top-k-overlap", "1") == 0
    gate = Bundle.load(tmp_path / "bundle").gate
    assert gate["top_k_overlap"] == gate["top_1_agreement"] == 1.0
    assert all(values["bf16"] == values["quantized"] for values in gate["quality"].values())


def test_a_failing_gate_exits_with_3_and_touches_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    assert build(folder, out, "--recipe", "bf16") == 0
    before = (out / "bundle.json").read_bytes()
    capsys.readouterr()
    assert build(folder, out, "--min-top-k-overlap", "1") == EXIT_GATE
    output, errors = capsys.readouterr()
    assert "gate FAILED" in output
    assert "with 95 % confidence) is below --min-top-k-overlap 1" in errors
    line = r"^  (\S+) \(fp8_\w+, error 0\.\d+(?:, KL [^)]+)?\): auto would keep fp8_\w+: "
    named = re.findall(line, errors, re.MULTILINE)
    rejected = Bundle.load(tmp_path / "bundle.rejected")
    assert len(named) == 5 and set(named) <= set(rejected.plan.quantized_sites)
    assert rejected.gate["passed"] is False and rejected.gate["top_k_overlap"] < 1
    assert (out / "bundle.json").read_bytes() == before


def test_held_out_file(folder: Path, tmp_path: Path) -> None:
    held_out = write_histories(tmp_path / "held_out.jsonl", 5, seed=9)
    assert build(folder, tmp_path / "bundle", "--held-out", str(held_out), "--gate-rows", "100") == 0
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.gate["rows"] == 5 and set(bundle.gate["quality"]) >= {"recall@10", "ndcg@10", "hit_rate@10"}


def test_amazon_catalog_and_histories_as_they_are(amazon_industrial: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", PRESETS["tiny"])
    arguments = ["--checkpoint", str(tmp_path / "checkpoint"), "--catalog", str(amazon_industrial)]
    arguments += ["--calibration", str(amazon_industrial / "test.csv"), "--out", str(tmp_path / "bundle")]
    # The default threshold: random weights pass it.
    assert main([*arguments, "--calibration-rows", "16", "--gate-rows", "32", "--device", "cpu"]) == 0
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.catalog.item_count == 3686 and bundle.gate["top_k_overlap"] > 0.8


def test_what_the_hopper_engine_would_refuse_is_not_built(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe, site in (("int8_row", "context.projection"), ("fp8_row", "layers.1.moe.down")):
        assert build(folder, tmp_path / "bundle", "--engine", "hopper", "--recipe", recipe) == EXIT_ERROR
        assert f"error: site {site}: recipe {recipe}: the hopper engine runs" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


def test_the_hopper_engine_is_checked_at_the_beam_that_a_server_takes() -> None:
    codebooks = (1 << 24, 4, 4)
    model = replace(PRESETS["tiny"], codebook_sizes=codebooks, beam_width=16)
    limits = EngineLimits(1, model.beam_width, model.max_context, model.levels)
    check_limits(model, limits)
    with pytest.raises(EngineError, match=r"limits\.beam 128 x codebook 16777216: expected below 2\^31"):
        check_hopper(model, limits, "auto")
    check_hopper(replace(model, codebook_sizes=(1 << 23, 4, 4)), limits, "auto")


def test_a_bundle_for_the_hopper_engine(folder: Path, tmp_path: Path) -> None:
    assert build(folder, tmp_path / "bundle", "--engine", "hopper") == 0
    assert Bundle.load(tmp_path / "bundle").engine == "hopper"


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--checkpoint", "nowhere", "--checkpoint: expected an existing directory, got 'nowhere'"),
        ("--catalog", "nowhere", "--catalog: expected an existing file or directory"),
        ("--recipe", "fp4", "--recipe: expected one of auto, bf16, "),
        ("--engine", "warp", "--engine warp: expected one of reference"),
        ("--gate-rows", "0", "--gate-rows: expected a whole number from 1"),
        ("--device", "cuda:99", "--device cuda:99: this machine has"),
        ("--device", f"cuda:{'9' * 20}", f"--device cuda:{'9' * 20} is not usable here: "),
        ("--surprise", "1", "--surprise"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    assert build(folder, tmp_path / "bundle", flag, value) == EXIT_ERROR
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith("error: ") and errors.count("\n") == 1 and message in errors
    assert not (tmp_path / "bundle").exists()


def test_the_root_is_no_place_for_a_bundle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(folder, Path("/")) == EXIT_ERROR
    assert capsys.readouterr().err == "error: --out: expected a path that ends in a name, got '/'\n"


def test_bad_files_are_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*more: str) -> str:
        assert build(folder, tmp_path / "bundle", *more) == EXIT_ERROR
        errors = capsys.readouterr().err
        assert errors.startswith("error: ") and errors.count("\n") == 1
        return errors

    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"item_id": "a"}\n')
    assert "broken.jsonl" in error("--catalog", str(broken))
    assert "broken.jsonl" in error("--calibration", str(broken))
    assert "config.json: file not found" in error("--checkpoint", str(tmp_path))

    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["layers.1.moe.selection_bias"][5] = math.nan  # which no GEMM reads, and so no probe sees
    save_file(tensors, checkpoint / "model.safetensors")
    assert "model.safetensors: tensor layers.1.moe.selection_bias holds NaN" in error("--checkpoint", str(checkpoint))
    del tensors["heads.1.weight"]
    save_file(tensors, checkpoint / "model.safetensors")
    assert "missing tensor heads.1.weight" in error("--checkpoint", str(checkpoint))

    for content, message in (("[" * 100_000, "config.json: not readable as JSON"), ('{"model_type": 1}', "model_type")):
        (checkpoint / "config.json").write_text(content)
        assert message in error("--checkpoint", str(checkpoint))

    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "mine.txt").touch()
    assert "holds files that are no bundle" in error()
    assert (tmp_path / "bundle" / "mine.txt").exists()


# Everything is written, nothing is in its place yet: there it waits for the signal, however busy the machine is.
BUILD_THAT_WAITS = """
import sys, time
from loka_serve import build
build.publish = lambda *arguments: time.sleep(60)
sys.exit(build.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    more = ("--calibration-rows", "2", "--gate-rows", "22", "--batch", "1")
    arguments = build_arguments(folder, *more)
    arguments[arguments.index("--out") + 1] = str(tmp_path / "bundle")
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD_THAT_WAITS, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it for background jobs
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.iterdir()):  # until it has begun to write
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "interrupted: nothing was written\n"
    assert list(tmp_path.iterdir()) == []


MEASURE_PEAK = """
import sys
import torch
torch.set_num_threads(1)
from loka_serve.build import main
from loka_serve.build_summary import peak_memory
for arguments in (sys.argv[1].split("|"), sys.argv[2].split("|")):
    code = main(arguments)
    print("PEAK", code, peak_memory())
"""

MEASURE_LOAD = """
import sys
import torch
torch.set_num_threads(1)
from loka_serve.build_summary import peak_memory
from loka_serve.bundle import Bundle
for path in sys.argv[1:]:
    model = Bundle.load(path).load_model()
    print("PEAK", 0, peak_memory())
    del model
"""


def peaks(program: str, *arguments: str) -> list[int]:
    """Peak memory of a process after each of its steps."""
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    found = re.findall(r"^PEAK (\d+) (\d+)$", result.stdout, re.MULTILINE)
    assert [code for code, _ in found] == ["0", "0"], result.stderr
    return [int(peak) for _, peak in found]


def test_peak_memory_stays_below_twice_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Beyond what the same build of a tiny checkpoint needs, which is Python, torch and its libraries."""
    large = {"d_model": 768, "heads": 6, "head_dim": 128, "d_ff": 1536, "expert_width": 768, "beam_width": 4}
    config = json.loads((folder / "checkpoint" / "config.json").read_text()) | large
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    write_random_weights(checkpoint)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert size > 80e6

    def arguments(out: str, *more: str) -> list[str]:
        found = build_arguments(folder, "--calibration-rows", "2", "--gate-rows", "2", *more)
        found[found.index("--out") + 1] = str(tmp_path / out)
        return found

    steps = arguments("small"), arguments("large", "--checkpoint", str(checkpoint))
    baseline, peak = peaks(MEASURE_PEAK, *("|".join(step) for step in steps))
    assert peak - baseline < 2 * size

    stored = sum(file.stat().st_size for file in (tmp_path / "large").glob("weights-*"))
    baseline, peak = peaks(MEASURE_LOAD, str(tmp_path / "small"), str(tmp_path / "large"))
    # In memory the weights are float32, four bytes for each stored one, and there is one site's copy in between;
    # with the file and its copies both in memory it would be more than five.
    assert peak - baseline < 5 * stored


def write_random_weights(checkpoint: Path) -> None:
    from loka_serve.models.checkpoint import load_config
    from loka_serve.models.onerec_v2 import OneRecV2

    with torch.device("meta"):
        model = OneRecV2(load_config(checkpoint))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        scale = parameter.shape[-1] ** -0.5
        tensors[name] = torch.randn(parameter.shape, generator=generator).mul_(scale).bfloat16()
    save_file(tensors, checkpoint / "model.safetensors")
