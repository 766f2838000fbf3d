"""What runs the dense segments: TensorRT, TensorRT-RTX, ONNX Runtime or torch, behind one protocol."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from loka_serve.errors import EngineError

if TYPE_CHECKING:
    import torch

    from loka_serve.engines.tensorrt.runtimes.base import SegmentRuntime

RUNTIMES = ("tensorrt", "tensorrt-rtx", "onnxruntime", "torch")
_CLASSES = {
    "tensorrt": "TensorRTRuntime",
    "tensorrt-rtx": "TensorRTRtxRuntime",
    "onnxruntime": "OnnxRuntime",
    "torch": "TorchRuntime",
}


def make_runtime(name: str, device: torch.device) -> SegmentRuntime:
    """A runtime by its name.

    Raises:
        EngineError: an unknown name, a runtime that is not installed (says what to install), or not for this device.
    """
    if name not in RUNTIMES:
        raise EngineError(f"--trt-runtime {name}: expected one of {', '.join(RUNTIMES)}")
    if name == "onnxruntime" and device.type != "cpu":
        raise EngineError(f"device {device}: the onnxruntime runtime runs segments on the CPU: expected --device cpu")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    create = getattr(module, _CLASSES[name])
    runtime: SegmentRuntime = create(device) if name == "torch" else create()
    return runtime
