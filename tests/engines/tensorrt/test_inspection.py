"""What inspection reads from a segment's file and from the inspector's JSON, and the command that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.inspection import (
    E4M3,
    SegmentProduct,
    build_command,
    describe_segment,
    fused,
    plan_layers,
)
from loka_serve.engines.tensorrt.runtimes.base import RowProfile, Segment, TensorSpec
from tests.engines.tensorrt.weights import TINY, mixed_plan, random_model, write_weights

PRODUCT = SegmentProduct("step.query", E4M3, E4M3, "step.query.codes")


def segments(directory: Path) -> dict[str, Segment]:
    model = random_model()
    plan = mixed_plan(model)
    stitching = export(TINY, plan, write_weights(directory, model, plan), "bfloat16")
    return {segment.name: segment for segment in stitching.segments}


def test_a_segment_is_described_by_its_file(tmp_path: Path) -> None:
    found = segments(tmp_path)
    attention = describe_segment(found["layers-1-cross_attention-output"])
    prefix = "step.layers.1"
    output, qkv = f"{prefix}.cross_attention.output", f"{prefix}.self_attention.qkv"
    assert attention.products == (
        SegmentProduct(output, E4M3, E4M3, f"{output}.codes"),
        SegmentProduct(qkv, E4M3, E4M3, f"{qkv}.codes"),
    )
    width, model = TINY.heads * TINY.head_dim, TINY.d_model
    assert attention.weight_bytes == {
        E4M3: model * width + 3 * width * model,
        "float32": 4 * (model + 3 * width + 2 + model),  # scales of channels, of inputs, and a norm's gains
    }
    head = describe_segment(found["heads-2"])
    assert head.products == (SegmentProduct("head2.logits", "bfloat16", "bfloat16", ""),)


def information(metadata: str, inputs: str) -> str:
    mark = "\x1e".join(f"[ONNX Layer: {name}]" for name in metadata.split())
    entry = {
        "Name": "gemm",
        "LayerType": "gemm",
        "Inputs": [{"Name": "x", "Format/Datatype": inputs}],
        "Outputs": [{"Name": "y", "Format/Datatype": "Row major BF16"}],
        "Metadata": mark,
    }
    return json.dumps({"Layers": ["a layer without details", entry], "Bindings": ["x", "y"]})


@pytest.mark.parametrize(
    ("metadata", "inputs", "verdict"),
    [
        ("step.query step.query.inputs", "Row major FP8", True),  # codes go in
        ("step.query.codes step.query", "Row major BF16", True),  # one kernel quantizes and multiplies
        ("step.query step.query.inputs", "Row major BF16", False),
        ("another", "Row major FP8", None),
    ],
)
def test_whether_a_product_multiplies_codes(metadata: str, inputs: str, verdict: bool | None) -> None:
    layers = plan_layers(information(metadata, inputs))
    assert [layer.name for layer in layers] == ["a layer without details", "gemm"]
    assert layers[1].origin == set(metadata.split())
    assert fused(PRODUCT, layers) is verdict


def test_the_command_builds_every_profile() -> None:
    segment = Segment(
        "part",
        Path("/somewhere/segment-part.onnx"),
        (TensorSpec("x", "bfloat16", (64,)), TensorSpec("y", "int32", ())),
        (),
    )
    profiles = [RowProfile(1, 8, 8), RowProfile(9, 512, 4096)]
    expected = (
        "trtexec --onnx=segment-part.onnx --saveEngine=segment-part.plan --skipInference --profilingVerbosity=detailed "
        "--timingCacheFile=timing.cache "
        "--profile=0 --minShapes=x:1x64,y:1 --optShapes=x:8x64,y:8 --maxShapes=x:8x64,y:8 "
        "--profile=1 --minShapes=x:9x64,y:9 --optShapes=x:512x64,y:512 --maxShapes=x:4096x64,y:4096"
    )
    assert build_command("tensorrt", "11.4.0", segment, profiles, "segment-part.plan") == expected
    ten = build_command("tensorrt", "10.9.0", segment, profiles, "segment-part.plan")
    assert ten == expected.replace("timing.cache ", "timing.cache --stronglyTyped ")
    rtx = build_command("tensorrt-rtx", "1.7", segment, profiles[:1], "p", "8.9,12.0")
    assert rtx.startswith("tensorrt_rtx --onnx=segment-part.onnx --saveEngine=p ")
    assert "--computeCapabilities=89,120 --profile=0" in rtx
