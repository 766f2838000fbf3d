"""Writing ONNX: typed values, nodes, and weights that stay where they are, in the bundle's safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from loka_serve.engines.tensorrt.schemas import LOKA_DOMAIN, LOKA_VERSION
from loka_serve.errors import EngineError
from loka_serve.tensor_files import TensorPlace, tensor_places

OPSET = 23
"""RMSNormalization, and DequantizeLinear with a type of its own, are there from this version on."""
IR_VERSION = 11


ONNX_TYPES: dict[str, int] = {
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float16": onnx.TensorProto.FLOAT16,
    "float32": onnx.TensorProto.FLOAT,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
}
"""ONNX element types by torch's names."""

Dimension = int | str


@dataclass(frozen=True)
class Value:
    """A tensor of the graph; dimensions that are texts are known when it runs."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]

    def info(self) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(self.name, ONNX_TYPES[self.dtype], self.shape)


def bundle_tensors(files: Iterable[Path]) -> dict[str, TensorPlace]:
    """Every tensor of a bundle's weight files by name."""
    return {name: place for file in files for name, place in tensor_places(file).items()}


@dataclass
class GraphBuilder:
    """Collects nodes in the order of execution.

    Attributes:
        tensors: what weights may be taken from, by name.
        values: every value by name, weights not included.
    """

    tensors: Mapping[str, TensorPlace]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)

    def input(self, name: str, dtype: str, *shape: Dimension) -> Value:
        value = Value(name, dtype, shape)
        self.inputs.append(value)
        return value

    def weight(self, name: str, shape: tuple[int, ...] | None = None) -> Value:
        """A tensor of the weight files as an initializer with external data, seen in another shape if one is given.

        Raises:
            EngineError: there is no such tensor.
        """
        place = self.tensors.get(name)
        if place is None:
            raise EngineError(f"the bundle's weights have no tensor {name}")
        dtype = str(place.dtype).removeprefix("torch.")
        shape = place.shape if shape is None else shape
        if name not in self.initializers:
            tensor = onnx.TensorProto(
                name=name, data_type=ONNX_TYPES[dtype], dims=shape, data_location=onnx.TensorProto.EXTERNAL
            )
            entries = {"location": place.file.name, "offset": str(place.offset), "length": str(place.bytes)}
            for key, text in entries.items():
                tensor.external_data.add(key=key, value=text)
            self.initializers[name] = tensor
        return Value(name, dtype, shape)

    def constant(self, name: str, array: np.ndarray) -> Value:
        """A small constant, kept in the model itself."""
        self.initializers.setdefault(name, numpy_helper.from_array(array, name))
        return Value(name, str(array.dtype), array.shape)

    def node(
        self,
        operation: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value],
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """Append a node; an input of None is one that is left out."""
        names = ["" if value is None else value.name for value in inputs]
        outs = [value.name for value in outputs]
        self.nodes.append(helper.make_node(operation, names, outs, name=outs[0], domain=domain, **attributes))
        for value in outputs:
            if value.name in self.values:
                raise EngineError(f"value {value.name} is produced twice")
            self.values[value.name] = value

    def one(
        self,
        operation: str,
        inputs: Sequence[Value | None],
        name: str,
        dtype: str,
        shape: tuple[Dimension, ...],
        **attributes: Any,
    ) -> Value:
        """As `node`, for an operation with one output, which is returned."""
        value = Value(name, dtype, shape)
        self.node(operation, inputs, [value], **attributes)
        return value

    def cast(self, value: Value, dtype: str, name: str) -> Value:
        """The value itself if it has the type already."""
        if value.dtype == dtype:
            return value
        return self.one("Cast", [value], name, dtype, value.shape, to=ONNX_TYPES[dtype])

    def model(self, name: str, outputs: Sequence[Value]) -> onnx.ModelProto:
        used = {text for node in self.nodes for text in node.input}
        return make_model(
            name,
            self.nodes,
            [value for value in self.inputs if value.name in used],
            outputs,
            [tensor for text, tensor in self.initializers.items() if text in used],
            [value for value in self.values.values() if value not in outputs],
        )


def make_model(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    initializers: Sequence[onnx.TensorProto],
    values: Sequence[Value],
) -> onnx.ModelProto:
    """An ONNX model; the domain `loka` is declared if a node is of it."""
    graph = helper.make_graph(
        nodes,
        name,
        [value.info() for value in inputs],
        [value.info() for value in outputs],
        initializers,
        value_info=[value.info() for value in values],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    if any(node.domain == LOKA_DOMAIN for node in nodes):
        opsets.append(helper.make_opsetid(LOKA_DOMAIN, LOKA_VERSION))
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="loka-serve")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
