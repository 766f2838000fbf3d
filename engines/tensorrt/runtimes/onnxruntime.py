"""Segments in ONNX Runtime on the CPU: the portable runtime, which tests the executor's logic and numerics anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loka_serve.engines.tensorrt.runtimes.base import BuiltPlan, RowProfile, Segment
from loka_serve.errors import EngineError

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # or it reports to its maker, and leaves files in TMPDIR
try:
    import numpy as np
    import onnxruntime
except ImportError as error:
    raise EngineError("ONNX Runtime is not installed: pip install 'loka-serve[onnxruntime]'") from error

NUMPY_TYPES = {"float32": np.float32, "int32": np.int32, "int64": np.int64}


class OnnxRuntime:
    """Needs no plan: ONNX Runtime optimises a segment when it is loaded."""

    name = "onnxruntime"
    dtype = "float32"  # its CPU kernels multiply no bfloat16

    def environment(self) -> dict[str, str]:
        """Empty: every version runs every segment."""
        return {}

    def build(self, segment: Segment, profiles: Sequence[RowProfile], cache: bytes = b"") -> BuiltPlan:
        self.load(segment, b"")
        return BuiltPlan(b"")

    def load(self, segment: Segment, plan: bytes) -> OnnxProgram:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            session = onnxruntime.InferenceSession(str(segment.file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common base class
            raise EngineError(f"segment {segment.name}: ONNX Runtime: {str(error).splitlines()[0]}") from error
        return OnnxProgram(segment, session)


class OnnxProgram:
    """A segment's session; tensors are read and written where they are."""

    scratch_bytes = 0

    def __init__(self, segment: Segment, session: onnxruntime.InferenceSession) -> None:
        self.segment, self.session = segment, session

    def use_scratch(self, scratch: Tensor) -> None:
        """Nothing to do: the session has its own."""

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], stream: int = 0) -> None:
        binding = self.session.io_binding()
        for spec in self.segment.inputs:
            tensor = inputs[spec.name]
            assert tensor.is_contiguous()
            binding.bind_input(spec.name, "cpu", 0, NUMPY_TYPES[spec.dtype], tuple(tensor.shape), tensor.data_ptr())
        for spec in self.segment.outputs:
            tensor = outputs[spec.name]
            binding.bind_output(spec.name, "cpu", 0, NUMPY_TYPES[spec.dtype], tuple(tensor.shape), tensor.data_ptr())
        self.session.run_with_iobinding(binding)
