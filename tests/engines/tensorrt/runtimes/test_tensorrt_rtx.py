"""TensorRT-RTX takes every segment, without a GPU: it parses, sees FP8 products, and builds plans of FP8 weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest

from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.runtimes.base import RowProfile, Segment
from loka_serve.engines.tensorrt.steps import Stitching
from loka_serve.errors import EngineError
from loka_serve.models.checkpoint import load_checkpoint
from loka_serve.models.config import PRESETS, OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from tests.engines.tensorrt.weights import mixed_plan, random_model, write_weights

pytest.importorskip("tensorrt_rtx")
from loka_serve.engines.tensorrt.runtimes.network import parse_segment, products  # noqa: E402
from loka_serve.engines.tensorrt.runtimes.tensorrt_rtx import CAPABILITIES, TensorRTRtxRuntime  # noqa: E402

ROOT = Path(__file__).parents[4]
# One dense block of the preset at its own widths; small codebooks, as heads are built like any other product.
BLOCK = dataclasses.replace(
    PRESETS["onerec-v2-4b-a0.5b"], layers=1, first_dense_layers=1, experts=0, codebook_sizes=(256, 256)
)
ROWS = [RowProfile(1, 512, 4096)]
KERNEL_BYTES = 155_000
"""Code of one product's kernel for one capability, whatever its widths, and as much for what the plan has around it."""
NORM_BYTES = 16_000


@dataclass(frozen=True)
class Exported:
    """Segments of a model with `fp8_tensor` at every dense site but the heads."""

    config: OneRecV2Config
    stitching: Stitching


def exported(model: OneRecV2, directory: Path) -> Exported:
    plan = mixed_plan(model)
    return Exported(model.config, export(model.config, plan, write_weights(directory, model, plan), "bfloat16"))


@pytest.fixture(scope="module")
def groceries(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model = load_checkpoint(ROOT / "examples/groceries/checkpoint", "cpu")
    return exported(model, tmp_path_factory.mktemp("groceries"))


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    yield exported(random_model(BLOCK), tmp_path_factory.mktemp("block"))


def weight_bytes(segment: Segment) -> tuple[int, int]:
    """Of a segment's weights as they are stored: (E4M3, all)."""
    initializers = onnx.load(segment.file, load_external_data=False).graph.initializer
    sizes = {
        onnx.TensorProto.FLOAT8E4M3FN: 1,
        onnx.TensorProto.BFLOAT16: 2,
        onnx.TensorProto.FLOAT: 4,
        onnx.TensorProto.INT64: 8,
    }
    stored = [(tensor.data_type, math.prod(tensor.dims) * sizes[tensor.data_type]) for tensor in initializers]
    return sum(size for kind, size in stored if kind == onnx.TensorProto.FLOAT8E4M3FN), sum(size for _, size in stored)


def norms(segment: Segment) -> int:
    nodes = onnx.load(segment.file, load_external_data=False).graph.node
    return sum(node.op_type == "RMSNormalization" for node in nodes)


def dense_products(config: OneRecV2Config) -> int:
    """MatMuls of all segments but the heads': projection, four a block, two of each dense feed-forward; queries of the
    first block follow each level's embeddings, so there is one for each of these."""
    dense_blocks = sum(not config.is_sparse(layer) for layer in range(config.layers))
    return 1 + 4 * config.layers + 2 * dense_blocks + config.levels - 1


@pytest.mark.parametrize("name", ["groceries", "block"])
def test_every_product_but_the_heads_multiplies_fp8(name: str, request: pytest.FixtureRequest) -> None:
    model: Exported = request.getfixturevalue(name)
    runtime = TensorRTRtxRuntime()
    found = [
        product
        for segment in model.stitching.segments
        if not segment.name.startswith("heads-")
        for product in products(parse_segment(runtime.api, segment).network)
    ]
    assert [(product.inputs, product.weight) for product in found] == [("FP8", "FP8")] * dense_products(model.config)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["groceries", "block"])
def test_plans_hold_fp8_weights(name: str, capability: str, request: pytest.FixtureRequest) -> None:
    model: Exported = request.getfixturevalue(name)
    runtime = TensorRTRtxRuntime((capability,))
    for segment in model.stitching.segments:
        plan = runtime.build(segment, ROWS).plan
        fp8, stored = weight_bytes(segment)
        if not fp8:
            continue  # a head: multiplied in float32
        multiplied = len(products(parse_segment(runtime.api, segment).network))
        code = KERNEL_BYTES * (multiplied + 1) + NORM_BYTES * norms(segment)
        assert stored <= len(plan) <= 1.02 * stored + code
        if fp8 > 4_000_000:  # where code counts for little
            assert len(plan) <= 1.1 * fp8


def test_a_plan_built_again_has_the_same_size(block: Exported) -> None:
    segment = next(part for part in block.stitching.segments if part.name == "layers-0-self_attention-output")
    runtime = TensorRTRtxRuntime(("12.0",))
    profiles = [RowProfile(1, 1, 8), RowProfile(9, 512, 4096)]
    first = runtime.build(segment, profiles)
    again = runtime.build(segment, profiles, first.cache)
    assert len(again.plan) == len(first.plan)


def test_bf16_weights_would_be_seen(tmp_path: Path, block: Exported) -> None:
    """The check above is sharp: the same segment in BF16 exceeds its bound."""
    model = random_model(BLOCK)
    plan = mixed_plan(model, "bf16")
    wide = export(BLOCK, plan, write_weights(tmp_path, model, plan), "bfloat16")
    name = "layers-0-cross_attention-output"
    segments = {segment.name: segment for segment in block.stitching.segments}
    runtime = TensorRTRtxRuntime(("8.9",))
    bf16 = next(segment for segment in wide.segments if segment.name == name)
    _, stored = weight_bytes(segments[name])
    assert len(runtime.build(bf16, ROWS).plan) > 1.9 * stored > 1.1 * stored + 3 * KERNEL_BYTES
    assert {(product.inputs, product.weight) for product in products(parse_segment(runtime.api, bf16).network)} == {
        ("BF16", "BF16")
    }


def test_what_the_library_does_not_take_is_named(tmp_path: Path, block: Exported) -> None:
    segment = block.stitching.segments[0]
    model = onnx.load(segment.file, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperation"
    broken = dataclasses.replace(segment, file=segment.file.with_name("segment-broken.onnx"))
    onnx.save(model, broken.file)
    with pytest.raises(
        EngineError, match=rf"segment {segment.name}: tensorrt_rtx .* does not take segment-broken.onnx"
    ):
        TensorRTRtxRuntime().build(broken, ROWS)


def test_hopper_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"compute capability 9.0: expected some of 7.5, 8.0, 8.6, 8.9, 12.0"):
        TensorRTRtxRuntime(("9.0",))
