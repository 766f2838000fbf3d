"""Splitting the graph at nodes of domain `loka` into dense segments, and the order in which everything runs.

Levels repeat the same work on other rows: a segment that differs from an earlier one in nothing but the level is that
segment again, built and kept once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from loka_serve.engines.tensorrt.builder import ONNX_TYPES, Value, make_model
from loka_serve.engines.tensorrt.runtimes.base import DTYPES, ROWS, Segment, TensorSpec
from loka_serve.engines.tensorrt.schemas import LOKA_DOMAIN
from loka_serve.engines.tensorrt.steps import OperationStep, SegmentStep, Stitching
from loka_serve.errors import EngineError

SEGMENT_PREFIX = "segment-"
_LEVEL = re.compile(r"^level\d+\.")
_TYPE_NAMES = {number: name for name, number in ONNX_TYPES.items()}


def split_graph(model: onnx.ModelProto, directory: Path) -> Stitching:
    """Cut a graph of `build_graph` and write its segments as ``segment-{name}.onnx`` beside the weights.

    Args:
        directory: holds the files that the graph's external data points to.

    Raises:
        EngineError: nodes that no segment can hold.
    """
    graph = model.graph
    values = {info.name: _value(info) for info in (*graph.input, *graph.output, *graph.value_info)}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    readers = _readers(graph)
    found: dict[str, tuple[Segment, bytes]] = {}
    steps: list[SegmentStep | OperationStep] = []
    for nodes in _regions(graph.node):
        if nodes[0].domain == LOKA_DOMAIN:
            steps.append(_operation(nodes[0], initializers))
            continue
        region = _Region.of(nodes, initializers, readers, values)
        segment, content = region.write(directory)
        known = found.setdefault(segment.name, (segment, content))
        if known[1] != content:
            raise EngineError(f"segment {segment.name}: two different ones of that name")
        steps.append(SegmentStep(segment.name, region.inputs, region.outputs, region.rows))
    for segment, content in found.values():
        segment.file.write_bytes(content)
    return Stitching(tuple(segment for segment, _ in found.values()), tuple(steps), _names(graph.output))


def _regions(nodes: Sequence[onnx.NodeProto]) -> list[list[onnx.NodeProto]]:
    """Consecutive dense nodes of one scope (the first part of their names) together, `loka` nodes alone."""
    regions: list[list[onnx.NodeProto]] = []
    before: str | None = None
    for node in nodes:
        scope = None if node.domain == LOKA_DOMAIN else node.name.partition(".")[0]
        if scope is not None and scope == before:
            regions[-1].append(node)
        else:
            regions.append([node])
        before = scope
    return regions


def _readers(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Names of the nodes that read each value; the graph itself reads its outputs, as a node without name."""
    readers: dict[str, list[str]] = {info.name: [""] for info in graph.output}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.name)
    return readers


@dataclass(frozen=True)
class _Region:
    """Dense nodes that run together, and the graph's values that go in and out."""

    nodes: Sequence[onnx.NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Sequence[onnx.TensorProto]
    values: Mapping[str, Value]
    rows: str

    @classmethod
    def of(
        cls,
        nodes: Sequence[onnx.NodeProto],
        initializers: Mapping[str, onnx.TensorProto],
        readers: Mapping[str, Sequence[str]],
        values: Mapping[str, Value],
    ) -> _Region:
        inside = {node.name for node in nodes}
        made = {name for node in nodes for name in node.output}
        read = dict.fromkeys(name for node in nodes for name in node.input if name and name not in made)
        outputs = [
            name
            for node in nodes
            for name in node.output
            if any(reader not in inside for reader in readers.get(name, ()))
        ]
        inputs = [name for name in read if name not in initializers]
        rows = {values[name].shape[0] for name in (*inputs, *outputs)}
        if len(rows) != 1 or not all(isinstance(row, str) for row in rows):
            raise EngineError(f"segment at {nodes[0].name}: rows of {sorted(map(str, rows))}: expected one dimension")
        weights = [initializers[name] for name in read if name in initializers]
        return cls(nodes, tuple(inputs), tuple(outputs), weights, values, str(rows.pop()))

    @property
    def name(self) -> str:
        """After the first weight that is no norm's gain."""
        stored = (tensor.name for tensor in self.weights if tensor.data_location == onnx.TensorProto.EXTERNAL)
        first = next((name for name in stored if "norm" not in name), self.nodes[0].name)
        return first.removesuffix(".weight").removesuffix(".input_scale").replace(".", "-")

    def write(self, directory: Path) -> tuple[Segment, bytes]:
        nodes = []
        for node in self.nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = _plain(node.name)
            copy.input[:] = [_plain(name) for name in node.input]
            copy.output[:] = [_plain(name) for name in node.output]
            nodes.append(copy)
        inputs, outputs = ([self._plain_value(name) for name in names] for names in (self.inputs, self.outputs))
        inner = [self._plain_value(name) for node in self.nodes for name in node.output if name not in self.outputs]
        model = make_model(self.name, nodes, inputs, outputs, self.weights, inner)
        file = directory / f"{SEGMENT_PREFIX}{self.name}.onnx"
        segment = Segment(self.name, file, tuple(map(_spec, inputs)), tuple(map(_spec, outputs)))
        return segment, model.SerializeToString(deterministic=True)

    def _plain_value(self, name: str) -> Value:
        value = self.values[name]
        shape = (ROWS, *value.shape[1:]) if value.shape and value.shape[0] == self.rows else value.shape
        return Value(_plain(name), value.dtype, shape)


def _plain(name: str) -> str:
    """A value's name without the number of its level."""
    return _LEVEL.sub("step.", name)


def _spec(value: Value) -> TensorSpec:
    widths = tuple(width for width in value.shape[1:] if isinstance(width, int))
    if value.dtype not in DTYPES or len(widths) != len(value.shape) - 1:
        raise EngineError(
            f"value {value.name}: {value.dtype} {value.shape}: expected known widths, {', '.join(DTYPES)}"
        )
    return TensorSpec(value.name, value.dtype, widths)


def _value(info: onnx.ValueInfoProto) -> Value:
    tensor = info.type.tensor_type
    shape = tuple(dimension.dim_param or dimension.dim_value for dimension in tensor.shape.dim)
    return Value(info.name, _TYPE_NAMES[tensor.elem_type], shape)


def _operation(node: onnx.NodeProto, initializers: Mapping[str, onnx.TensorProto]) -> OperationStep:
    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
    inputs = tuple(name for name in node.input if name not in initializers)
    return OperationStep(node.op_type, inputs, tuple(node.output), attributes)


def _names(infos: Sequence[onnx.ValueInfoProto]) -> tuple[str, ...]:
    return tuple(info.name for info in infos)
