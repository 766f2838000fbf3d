"""What became of a segment: its products and the types that they multiply, bytes, and which Q/DQ a plan has fused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from loka_serve.engines.tensorrt.builder import ONNX_TYPES, torch_dtype
from loka_serve.engines.tensorrt.runtimes.base import RowProfile, Segment

_NAMES = {number: name for name, number in ONNX_TYPES.items()}
E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class SegmentProduct:
    """A MatMul of a segment.

    Attributes:
        inputs, weight: types of what is multiplied, before any dequantization.
        quantize: name of the node that quantizes the inputs; empty where none does.
    """

    name: str
    inputs: str
    weight: str
    quantize: str


@dataclass(frozen=True)
class SegmentDescription:
    """A segment as its ONNX file says.

    Attributes:
        weight_bytes: of its weights as they are stored, by type.
    """

    name: str
    nodes: int
    products: tuple[SegmentProduct, ...]
    weight_bytes: Mapping[str, int]


def describe_segment(segment: Segment) -> SegmentDescription:
    """Read a segment's file; its weights are not looked at."""
    graph = onnx.load(segment.file, load_external_data=False).graph
    made = {name: node for node in graph.node for name in node.output}
    types = {info.name: _NAMES[info.type.tensor_type.elem_type] for info in (*graph.input, *graph.value_info)}
    types |= {tensor.name: _NAMES[tensor.data_type] for tensor in graph.initializer}
    weight_bytes: dict[str, int] = {}
    for tensor in graph.initializer:
        kind = _NAMES[tensor.data_type]
        weight_bytes[kind] = weight_bytes.get(kind, 0) + math.prod(tensor.dims) * torch_dtype(kind).itemsize
    products = []
    for node in graph.node:
        if node.op_type == "MatMul":
            inputs, weight = (_stored(name, made, types) for name in node.input)
            producer = made.get(inputs)
            quantize = producer.name if producer is not None and producer.op_type == "QuantizeLinear" else ""
            products.append(SegmentProduct(node.name, types[inputs], types[weight], quantize))
    return SegmentDescription(segment.name, len(graph.node), tuple(products), weight_bytes)


def _stored(name: str, made: Mapping[str, onnx.NodeProto], types: Mapping[str, str]) -> str:
    """The value that a product's side was transposed, widened or dequantized from."""
    while name in made:
        node = made[name]
        source = node.input[0]
        widens = node.op_type == "Cast" and torch_dtype(types[source]).itemsize < torch_dtype(types[name]).itemsize
        if not widens and node.op_type not in ("Transpose", "DequantizeLinear"):
            break
        name = source
    return name


@dataclass(frozen=True)
class PlanLayer:
    """A layer of a plan as TensorRT's inspector tells of it.

    Attributes:
        origin: names of the ONNX nodes that it computes, as far as the plan says.
        inputs, outputs: their formats and types in the library's words.
    """

    name: str
    kind: str
    origin: frozenset[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def plan_layers(information: str) -> list[PlanLayer]:
    """The inspector's JSON of a plan that was built with detailed verbosity; layers without details have no types."""
    return [_layer(entry) for entry in json.loads(information).get("Layers", [])]


def _layer(entry: str | Mapping[str, Any]) -> PlanLayer:
    if isinstance(entry, str):
        return PlanLayer(entry, "", frozenset(), (), ())
    marks = str(entry.get("Metadata", "")).split("[ONNX Layer: ")[1:]
    inputs, outputs = (
        tuple(str(tensor.get("Format/Datatype", "")) for tensor in entry.get(side, ()))
        for side in ("Inputs", "Outputs")
    )
    origin = frozenset(mark.partition("]")[0] for mark in marks)
    return PlanLayer(str(entry.get("Name", "")), str(entry.get("LayerType", "")), origin, inputs, outputs)


def fused(product: SegmentProduct, layers: Sequence[PlanLayer]) -> bool | None:
    """Whether a plan multiplies a product's E4M3 codes themselves; None where it does not tell.

    It does if the layer of the product reads FP8, or is one with the layer that makes the codes.
    """
    holders = [layer for layer in layers if product.name in layer.origin]
    if not holders:
        return None
    reads_codes = any("FP8" in kind for layer in holders for kind in layer.inputs)
    return reads_codes or any(product.quantize in layer.origin for layer in holders)


def build_command(
    runtime: str, version: str, segment: Segment, profiles: Sequence[RowProfile], plan: str, capabilities: str = ""
) -> str:
    """A command line of the library's own tool that builds a plan of the same shapes, beside the bundle's files.

    Args:
        runtime: `tensorrt`, whose tool is trtexec, or `tensorrt-rtx`, whose tool is tensorrt_rtx.
        version: of the library; TensorRT 10 must be told that networks are strongly typed.
        capabilities: that TensorRT-RTX builds for, as `8.9,12.0`.
    """
    words = [
        "trtexec" if runtime == "tensorrt" else "tensorrt_rtx",
        f"--onnx={segment.file.name}",
        f"--saveEngine={plan}",
        "--skipInference",
        "--profilingVerbosity=detailed",
    ]
    if runtime == "tensorrt":
        words.append("--timingCacheFile=timing.cache")
        if version.partition(".")[0] == "10":
            words.append("--stronglyTyped")
    elif capabilities:
        words.append(f"--computeCapabilities={capabilities.replace('.', '')}")
    for index, profile in enumerate(profiles):
        words.append(f"--profile={index}")
        for flag, rows in (("min", profile.least), ("opt", profile.typical), ("max", profile.most)):
            shapes = (f"{spec.name}:{'x'.join(map(str, (rows, *spec.shape)))}" for spec in segment.inputs)
            words.append(f"--{flag}Shapes={','.join(shapes)}")
    return " ".join(words)
