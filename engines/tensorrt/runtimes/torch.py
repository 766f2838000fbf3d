"""Segments in torch, on a CPU or a GPU: no plans; on a GPU compiled once for all segments of the same structure.

There to run the stitched executor on a Hopper GPU without TensorRT, and so to measure what stitching costs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loka_serve.engines.tensorrt.builder import ONNX_TYPES, torch_dtype
from loka_serve.engines.tensorrt.runtimes.base import BuiltPlan, RowProfile, Segment
from loka_serve.engines.tensorrt.runtimes.torch_operations import OPERATIONS, Value, tensor
from loka_serve.errors import EngineError

_TYPES = {number: torch_dtype(name) for name, number in ONNX_TYPES.items()}


@dataclass(frozen=True)
class Instruction:
    """One node: its operation, places of its inputs and outputs among all values, and its attributes."""

    operation: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Procedure:
    """A segment without its weights; values are numbered, inputs first, then weights. Equal ones compute alike."""

    inputs: int
    weights: int
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def __call__(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        values: dict[int, Value] = dict(enumerate((*inputs, *weights)))
        for step in self.instructions:
            taken = [values[place] for place in step.inputs]
            values.update(zip(step.outputs, OPERATIONS[step.operation](taken, dict(step.attributes)), strict=True))
        for place, output in zip(self.outputs, outputs, strict=True):
            output.copy_(tensor(values[place]))


class TorchProgram:
    """A segment's procedure with its weights on the device."""

    scratch_bytes = 0

    def __init__(self, segment: Segment, run: Callable[..., None], weights: Sequence[Tensor]) -> None:
        self.segment, self._run, self.weights = segment, run, weights

    def use_scratch(self, scratch: Tensor) -> None:
        """Nothing to do: torch's allocator has it."""

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], stream: int = 0) -> None:
        given = [inputs[spec.name] for spec in self.segment.inputs]
        self._run(given, self.weights, [outputs[spec.name] for spec in self.segment.outputs])


class TorchRuntime:
    """Runs on torch's current stream of its device.

    Args:
        compiled: fuse what stands between products, by torch.compile; None does so on a GPU.
    """

    name = "torch"

    def __init__(self, device: torch.device | str = "cpu", compiled: bool | None = None) -> None:
        self.device = torch.device(device)
        self.dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.compiled = self.device.type == "cuda" if compiled is None else compiled
        self._procedures: dict[Procedure, Callable[..., None]] = {}

    def environment(self) -> dict[str, str]:
        """Empty: every version runs every segment."""
        return {}

    def build(self, segment: Segment, profiles: Sequence[RowProfile], cache: bytes = b"") -> BuiltPlan:
        read_segment(segment)
        return BuiltPlan(b"")

    def load(self, segment: Segment, plan: bytes) -> TorchProgram:
        procedure, weights = read_segment(segment)
        run = self._procedures.get(procedure)
        if run is None:
            run = compiled(procedure, f"procedure_{len(self._procedures)}") if self.compiled else procedure
            self._procedures[procedure] = run
        return TorchProgram(segment, run, [weight.to(self.device) for weight in weights])


def compiled(procedure: Procedure, name: str, backend: str = "inductor") -> Callable[..., None]:
    """The procedure for any number of rows, in one piece."""
    function = Procedure.__call__
    # Compilations are kept by code object, only a few each; every procedure has one of its own.
    code = function.__code__.replace(co_name=name)
    own = types.FunctionType(code, function.__globals__, name)
    return functools.partial(torch.compile(own, dynamic=True, fullgraph=True, backend=backend), procedure)


def read_segment(segment: Segment) -> tuple[Procedure, list[Tensor]]:
    """A segment's procedure and its weights on the CPU.

    Raises:
        EngineError: an operation that is not among `OPERATIONS`, or weights that cannot be read; names the segment.
    """
    import onnx
    from onnx import helper, numpy_helper

    graph = onnx.load(segment.file, load_external_data=False).graph
    constants = {part.name: part for part in graph.initializer}
    sizes = {node.input[1] for node in graph.node if node.op_type == "Split" and len(node.input) == 2}
    weights = {name: part for name, part in constants.items() if name not in sizes}
    places = {name: place for place, name in enumerate((*(spec.name for spec in segment.inputs), *weights))}
    instructions = []
    for node in graph.node:
        if node.op_type not in OPERATIONS:
            raise EngineError(f"segment {segment.name}: the torch runtime has no operation {node.op_type}")
        attributes = {part.name: _hashable(helper.get_attribute_value(part)) for part in node.attribute}
        for name in ("to", "output_dtype"):
            if name in attributes:
                attributes[name] = _TYPES[attributes[name]]
        for name in sizes.intersection(node.input):
            attributes["split"] = tuple(numpy_helper.to_array(constants[name]).tolist())
        places |= {name: len(places) + index for index, name in enumerate(node.output)}
        inputs = tuple(places[name] for name in node.input if name not in sizes)
        outputs = tuple(places[name] for name in node.output)
        instructions.append(Instruction(node.op_type, inputs, outputs, tuple(sorted(attributes.items()))))
    results = tuple(places[spec.name] for spec in segment.outputs)
    tensors = [_read(segment, part) for part in weights.values()]
    return Procedure(len(segment.inputs), len(tensors), tuple(instructions), results), tensors


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read(segment: Segment, part: Any) -> Tensor:
    from onnx import TensorProto, numpy_helper

    if part.data_location != TensorProto.EXTERNAL:
        return torch.from_numpy(numpy_helper.to_array(part).copy())
    entries = {entry.key: entry.value for entry in part.external_data}
    file = segment.file.with_name(Path(entries["location"]).name)
    try:
        content = np.fromfile(file, np.uint8, int(entries["length"]), offset=int(entries["offset"]))
    except OSError as error:
        raise EngineError(f"segment {segment.name}: {file}: cannot be read: {error.strerror}") from error
    dtype, shape = _TYPES[part.data_type], tuple(part.dims)
    if content.nbytes != int(entries["length"]):
        raise EngineError(f"segment {segment.name}: tensor {part.name} ends beyond {file}")
    return torch.from_numpy(content).view(dtype).reshape(shape)
