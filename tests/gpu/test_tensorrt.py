"""TensorRT's plans on the GPU at hand: segments against torch, products of FP8, runs that graphs record."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.inspection import E4M3, describe_segment, fused, plan_layers
from loka_serve.engines.tensorrt.runtimes.base import RowProfile, Segment
from loka_serve.engines.tensorrt.runtimes.torch import TorchRuntime
from loka_serve.engines.tensorrt.steps import Stitching
from loka_serve.errors import EngineError
from tests.engines.tensorrt.weights import TINY, mixed_plan, random_model, write_weights

pytest.importorskip("tensorrt")
from loka_serve.engines.tensorrt.runtimes.tensorrt import TensorRTRuntime  # noqa: E402

PROFILES = [RowProfile(1, 8, 8), RowProfile(9, 64, 200)]
# Widths that an FP8 product takes: multiples of 16.
WIDE = dataclasses.replace(TINY, d_model=128, heads=4, head_dim=32, d_ff=256, expert_width=64)


@pytest.fixture(scope="module")
def stitching(tmp_path_factory: pytest.TempPathFactory) -> Stitching:
    model = random_model(WIDE)
    plan = mixed_plan(model)
    directory = tmp_path_factory.mktemp("segments")
    return export(WIDE, plan, write_weights(directory, model, plan), "bfloat16")


def tensors(segment: Segment, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random inputs, and outputs to be filled."""
    generator = torch.Generator("cuda").manual_seed(rows)
    inputs = {
        spec.name: torch.zeros(rows, dtype=torch.int32, device="cuda")
        if spec.dtype == "int32"
        else torch.randn(rows, *spec.shape, device="cuda", generator=generator).to(getattr(torch, spec.dtype))
        for spec in segment.inputs
    }
    outputs = {
        spec.name: torch.empty(rows, *spec.shape, device="cuda", dtype=getattr(torch, spec.dtype))
        for spec in segment.outputs
    }
    return inputs, outputs


def check_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """BF16 between operations and E4M3 inputs: now and then a code falls the other way."""
    for name, tensor in found.items():
        distance = (tensor.float() - wanted[name].float()).norm() / wanted[name].float().norm()
        assert distance < 1e-2, name


def test_segments_give_what_torch_gives(stitching: Stitching) -> None:
    runtime, oracle = TensorRTRuntime(), TorchRuntime("cuda", compiled=False)
    cache = b""
    for segment in stitching.segments:
        built = runtime.build(segment, PROFILES, cache)
        cache = built.cache or cache
        program, expected = runtime.load(segment, built.plan), oracle.load(segment, b"")
        for rows in (1, 8, 9, 200):
            inputs, outputs = tensors(segment, rows)
            wanted = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
            program.run(inputs, outputs, torch.cuda.current_stream().cuda_stream)
            expected.run(inputs, wanted)
            torch.cuda.synchronize()
            check_alike(outputs, wanted)
    assert cache  # TensorRT times its kernels, and keeps what it found


def test_every_fp8_product_multiplies_codes(stitching: Stitching) -> None:
    runtime, verdicts = TensorRTRuntime(), {}
    for segment in stitching.segments:
        layers = plan_layers(runtime.load(segment, runtime.build(segment, PROFILES).plan).describe())
        for product in describe_segment(segment).products:
            if product.weight == E4M3:
                verdicts[segment.name, product.name] = fused(product, layers)
    assert False not in verdicts.values(), verdicts
    assert True in verdicts.values(), verdicts  # the plans do tell


def test_a_recorded_run_repeats_with_new_inputs(stitching: Stitching) -> None:
    segment = next(part for part in stitching.segments if part.name == "layers-0-self_attention-output")
    runtime = TensorRTRuntime()
    program = runtime.load(segment, runtime.build(segment, PROFILES).plan)
    program.use_scratch(torch.empty(max(program.scratch_bytes, 1), dtype=torch.uint8, device="cuda"))
    inputs, outputs = tensors(segment, 64)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        program.run(inputs, outputs, side.cuda_stream)  # makes the context, which a graph must not record
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        program.run(inputs, outputs, side.cuda_stream)
    for tensor in inputs.values():
        tensor.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    wanted = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
    TorchRuntime("cuda", compiled=False).load(segment, b"").run(inputs, wanted)
    check_alike(outputs, wanted)


def test_a_damaged_plan_is_refused(stitching: Stitching) -> None:
    runtime = TensorRTRuntime()
    segment = stitching.segments[0]
    plan = runtime.build(segment, PROFILES).plan
    with pytest.raises(EngineError, match=f"segment {segment.name}: tensorrt .* does not load its plan"):
        runtime.load(segment, plan[: len(plan) // 2])
