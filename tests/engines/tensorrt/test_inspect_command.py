"""`python -m loka_serve.engines.tensorrt inspect`, on plans of TensorRT-RTX and on a bundle without plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loka_serve.bundle import Bundle
from loka_serve.engines.tensorrt.__main__ import inspect, main
from loka_serve.engines.tensorrt.artifacts import Artifacts
from loka_serve.errors import EngineError
from tests.building import CONFIG
from tests.engines.tensorrt.bundles import build_bundle

FLAGS = ("--engine", "tensorrt", "--recipe", "fp8_tensor")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    pytest.importorskip("tensorrt_rtx")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("loka_serve.build_segments.SERVED_BATCH", 2)  # few profiles are soon built
        return build_bundle(tmp_path_factory.mktemp("rtx"), *FLAGS, "--trt-runtime", "tensorrt-rtx")


def test_plans_are_told_with_products_bytes_and_commands(planned: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(planned.path)]) == 0
    output, notes = capsys.readouterr()
    artifacts = Artifacts.load(planned.path)
    assert artifacts.runtime == "tensorrt-rtx" and artifacts.dtype == "bfloat16"
    names = [segment.name for segment in artifacts.stitching.segments]
    assert set(artifacts.plans) == set(names)
    assert output.splitlines()[0].startswith(f"{planned.path}: {len(names)} segments for tensorrt-rtx (version ")
    assert re.findall(r"^(\S+): \d+ nodes; weights .* plan ", output, re.MULTILINE) == names
    dense = [site for site, recipe in planned.plan.recipes.items() if recipe == "fp8_tensor"]
    levels = CONFIG.levels - 1  # each repeats the first query behind its own embeddings
    assert output.count(": FP8 x FP8\n") == len(dense) + levels
    assert output.count(": BF16 x BF16\n") == CONFIG.levels  # heads
    assert output.count("  tensorrt_rtx --onnx=segment-") == len(names)
    assert notes.startswith("layers of plans are not told here: ")


def test_one_segment(planned: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(planned.path), "--segment", "heads-1", "--layers"]) == 0
    output, _ = capsys.readouterr()
    assert "  head1.logits: BF16 x BF16\n" in output and "head2" not in output
    assert main(["inspect", str(planned.path), "--segment", "tails-1"]) == 2
    assert capsys.readouterr().err.startswith("error: segment 'tails-1': expected one of ")


def test_a_plan_s_layers_say_what_was_fused(planned: Bundle) -> None:
    entry = {
        "Name": "gemm_fp8",
        "LayerType": "gemm",
        "Inputs": [{"Format/Datatype": "FP8 row major"}],
        "Outputs": [{"Format/Datatype": "BF16 row major"}],
        "Metadata": "[ONNX Layer: context.projected]",
    }
    lines = list(inspect(planned, "context-projection", True, lambda segment: json.dumps({"Layers": [entry]})))
    assert "  context.projected: FP8 x FP8, fused" in lines
    assert "  layer gemm_fp8 (gemm): FP8 row major -> BF16 row major" in lines
    entry["Inputs"] = [{"Format/Datatype": "BF16 row major"}]
    lines = list(inspect(planned, "context-projection", False, lambda segment: json.dumps({"Layers": [entry]})))
    assert "  context.projected: FP8 x FP8, NOT fused" in lines


def test_profiles_hold_every_batch_within_the_limits(planned: Bundle) -> None:
    artifacts = Artifacts.load(planned.path)
    limits = artifacts.limits
    for segment in artifacts.stitching.segments:
        profiles = artifacts.profiles[segment.name]
        assert profiles[0].least == 1
        assert all(left.most + 1 == right.least for left, right in zip(profiles, profiles[1:], strict=False))
        most = {"batch": limits.batch, "beam_rows": limits.batch * limits.beam}
        most["context_rows"] = limits.batch * (1 + limits.context)
        assert profiles[-1].most == max(most[rows] for rows in artifacts.stitching.rows_of(segment.name))


def test_plans_of_tensorrt_rtx_are_not_served_on_a_cpu(planned: Bundle) -> None:
    from loka_serve.engines import load_engine

    with pytest.raises(EngineError, match="TensorRT-RTX loads plans on a GPU, and this machine has none"):
        load_engine(planned, "tensorrt", "cpu", Artifacts.load(planned.path).limits)


def test_a_bundle_of_another_engine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = build_bundle(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(bundle.path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {bundle.path}: holds no tensorrt.json: build it with --engine tensorrt\n"
    )
