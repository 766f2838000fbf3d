"""Segments in torch give what ONNX Runtime gives; those of equal structure share a procedure."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.runtimes.base import Segment
from loka_serve.engines.tensorrt.runtimes.torch import TorchRuntime, read_segment
from loka_serve.engines.tensorrt.steps import Stitching
from loka_serve.errors import EngineError
from loka_serve.models.config import OneRecV2Config
from tests.engines.tensorrt.weights import TINY, mixed_plan, random_model, write_weights

VARIANTS = {
    "silu": TINY,
    "block_norm": dataclasses.replace(TINY, norm="block", d_model=320, activation="hard_swish", layers=2),
    "biases": dataclasses.replace(TINY, linear_bias=True, layers=2),
}


def stitch(directory: Path, config: OneRecV2Config = TINY, dense: str = "fp8_tensor") -> Stitching:
    model = random_model(config)
    plan = mixed_plan(model, dense)
    return export(config, plan, write_weights(directory, model, plan), "float32")


def random_inputs(segment: Segment, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        spec.name: torch.randn(rows, *spec.shape, generator=generator)
        if spec.dtype == "float32"
        else torch.zeros(rows, dtype=torch.int32)
        for spec in segment.inputs
    }


def empty_outputs(segment: Segment, rows: int) -> dict[str, Tensor]:
    return {spec.name: torch.full((rows, *spec.shape), torch.nan) for spec in segment.outputs}


@pytest.mark.parametrize("dense", ["fp8_tensor", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_give_what_onnx_runtime_gives(variant: str, dense: str, tmp_path: Path) -> None:
    runtime = TorchRuntime()
    assert runtime.dtype == "float32"
    for segment in stitch(tmp_path, VARIANTS[variant], dense).segments:
        inputs, outputs = random_inputs(segment, 7), empty_outputs(segment, 7)
        runtime.load(segment, runtime.build(segment, []).plan).run(inputs, outputs)
        session = onnxruntime.InferenceSession(str(segment.file), providers=["CPUExecutionProvider"])
        expected = session.run(list(outputs), {name: value.numpy() for name, value in inputs.items()})
        for found, wanted in zip(outputs.values(), expected, strict=True):
            # Same roundings to BF16 and E4M3, but sums in another order: now and then a code falls the other way, which
            # is a step of 2^-4 in one of at least 64 terms.
            distance = np.linalg.norm(found.numpy() - wanted) / np.linalg.norm(wanted)
            assert distance < 2e-3, segment.name


def test_layers_of_the_same_structure_share_a_procedure(tmp_path: Path) -> None:
    segments = {segment.name: segment for segment in stitch(tmp_path).segments}
    first, second = (read_segment(segments[f"layers-{layer}-cross_attention-output"]) for layer in (0, 1))
    assert first[0] == second[0]
    pairs = list(zip(first[1], second[1], strict=True))
    codes = [pair for pair in pairs if pair[0].dtype == torch.float8_e4m3fn]
    assert len(codes) == 2 and not any(torch.equal(one.float(), two.float()) for one, two in codes)
    other, _ = read_segment(segments["heads-0"])
    assert other != first[0]


def test_an_operation_that_torch_does_not_run_is_named(tmp_path: Path) -> None:
    segment = stitch(tmp_path).segments[0]
    model = onnx.load(segment.file, load_external_data=False)
    model.graph.node[0].op_type = "Softsign"
    onnx.save(model, segment.file)
    with pytest.raises(EngineError, match=f"segment {segment.name}: the torch runtime has no operation Softsign"):
        TorchRuntime().build(segment, [])


def test_missing_weights_are_named(tmp_path: Path) -> None:
    segment = stitch(tmp_path).segments[0]
    for file in tmp_path.glob("weights-f8*"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(EngineError, match=r"tensor context\.projection\.weight ends beyond .*weights-f8"):
        TorchRuntime().load(segment, b"")
