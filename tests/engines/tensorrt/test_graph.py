"""The graph of a bundle: valid ONNX, FP8 in the form that fuses, weights where they are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import onnx
import pytest

from loka_serve.engines.tensorrt.builder import OPSET, bundle_tensors
from loka_serve.engines.tensorrt.export import MODEL_FILE, export
from loka_serve.engines.tensorrt.graph import build_graph
from loka_serve.errors import EngineError
from loka_serve.models.config import OneRecV2Config
from loka_serve.quantization.plan import PrecisionPlan
from tests.engines.tensorrt.weights import TINY, mixed_plan, random_model, write_weights

VARIANTS = {
    "tiny": TINY,
    "rotary": dataclasses.replace(TINY, position_encoding="rotary"),
    "block_norm": dataclasses.replace(TINY, norm="block", activation="hard_swish"),
    "biases": dataclasses.replace(TINY, linear_bias=True, short_term_length=4),
    "dense": dataclasses.replace(TINY, experts=0, experts_per_token=0, expert_width=0, shared_experts=0),
}


def graph_of(tmp_path: Path, config: OneRecV2Config, dtype: str, dense: str = "fp8_tensor") -> onnx.GraphProto:
    model = random_model(config)
    plan = mixed_plan(model, dense)
    return build_graph(config, plan, bundle_tensors(write_weights(tmp_path, model, plan)), dtype).graph


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_file_passes_the_checker(variant: str, dtype: str, tmp_path: Path) -> None:
    config = VARIANTS[variant]
    model = random_model(config)
    plan = mixed_plan(model)
    stitching = export(config, plan, write_weights(tmp_path, model, plan), dtype)  # raises what the checker objects to
    whole = onnx.load(tmp_path / MODEL_FILE, load_external_data=False)
    domains = {opset.domain: opset.version for opset in whole.opset_import}
    assert domains == {"": OPSET, "loka": 1}
    for segment in stitching.segments:
        part = onnx.load(segment.file, load_external_data=False)
        assert [opset.domain for opset in part.opset_import] == [""]
        assert all(node.domain == "" for node in part.graph.node)


def test_an_fp8_site_is_quantize_dequantize_and_a_transposed_product(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, TINY, "bfloat16")
    made = {name: node for node in graph.node for name in node.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    types = {info.name: info.type.tensor_type.elem_type for info in graph.value_info}
    products = [node for node in graph.node if node.op_type == "MatMul" and "head" not in node.name]
    assert len(products) == 1 + TINY.levels * (4 * TINY.layers + 2)  # projection; four a block, two of the dense one
    for product in products:
        inputs, transpose = (made[name] for name in product.input)
        assert inputs.op_type == "DequantizeLinear" and transpose.op_type == "Transpose"
        weight = made[transpose.input[0]]
        assert weight.op_type == "DequantizeLinear"
        codes = weights[weight.input[0]]
        assert codes.data_type == onnx.TensorProto.FLOAT8E4M3FN
        assert codes.dims[0] == weights[weight.input[1]].dims[0]  # [out, in], a scale an output channel
        quantize = made[inputs.input[0]]
        assert quantize.op_type == "QuantizeLinear" and quantize.input[1] == inputs.input[1]
        assert list(weights[quantize.input[1]].dims) == []
        assert {types[name] for name in (*product.input, product.output[0])} == {onnx.TensorProto.BFLOAT16}
        # Nothing between the norm's rounding, or our kernel's output, and the quantization.
        assert types.get(quantize.input[0]) == onnx.TensorProto.BFLOAT16


def test_logits_are_multiplied_in_float32(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, TINY, "bfloat16")
    types = {info.name: info.type.tensor_type.elem_type for info in graph.value_info}
    heads = [node for node in graph.node if node.op_type == "MatMul" and node.name.startswith("head")]
    assert len(heads) == TINY.levels
    assert all(types[node.output[0]] == onnx.TensorProto.FLOAT for node in heads)


def test_operations_that_are_no_onnx_are_nodes_of_our_domain(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, VARIANTS["rotary"], "bfloat16")
    counts = Counter(node.op_type for node in graph.node if node.domain == "loka")
    assert counts == {
        "EmbedContext": 1,
        "RotateKeys": TINY.kv_layers,
        "BeamAttention": TINY.levels * TINY.layers,
        "SelfBeamAttention": TINY.levels * TINY.layers,
        "MoE": TINY.levels * (TINY.layers - TINY.first_dense_layers),
        "LevelSelect": TINY.levels,
    }


def test_weights_stay_in_the_bundles_files(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, TINY, "bfloat16")
    external = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    assert external == list(graph.initializer)
    files = {entry.value for tensor in external for entry in tensor.external_data if entry.key == "location"}
    assert files == {path.name for path in tmp_path.glob("weights-*.safetensors")}


def test_a_recipe_that_has_no_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"site context.projection: recipe fp8_row: .* runs bf16, fp8_tensor there"):
        graph_of(tmp_path, TINY, "bfloat16", dense="fp8_row")


def test_experts_keep_to_the_kernels_recipes() -> None:
    model = random_model()
    with pytest.raises(EngineError, match=r"moe.router: recipe fp8_tensor: .* runs bf16, fp8_row, fp8_block there"):
        build_graph(TINY, PrecisionPlan.uniform(model.sites(), "fp8_tensor"), {}, "bfloat16")


def test_the_checker_knows_our_operations(tmp_path: Path) -> None:
    model = random_model()
    plan = mixed_plan(model)
    export(TINY, plan, write_weights(tmp_path, model, plan), "float32")
    whole = onnx.load(tmp_path / MODEL_FILE, load_external_data=False)
    attention = next(node for node in whole.graph.node if node.op_type == "BeamAttention")
    del attention.attribute[0]
    onnx.save(whole, tmp_path / MODEL_FILE)
    with pytest.raises(onnx.checker.ValidationError, match="Required attribute '.*' is missing"):
        onnx.checker.check_model(str(tmp_path / MODEL_FILE), check_custom_domain=True)
