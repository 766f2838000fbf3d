"""What runs the dense segments: TensorRT, TensorRT-RTX, ONNX Runtime or torch, behind one protocol."""

from __future__ import annotations

RUNTIMES = ("tensorrt", "tensorrt-rtx", "onnxruntime", "torch")
