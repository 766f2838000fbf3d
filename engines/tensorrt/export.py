"""A bundle's weights become `model.onnx`, the whole graph, and the segments that a runtime builds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from loka_serve.engines.tensorrt.builder import bundle_tensors
from loka_serve.engines.tensorrt.graph import build_graph
from loka_serve.engines.tensorrt.schemas import register
from loka_serve.engines.tensorrt.segments import split_graph
from loka_serve.engines.tensorrt.steps import Stitching
from loka_serve.errors import EngineError
from loka_serve.models.config import OneRecV2Config
from loka_serve.quantization.plan import PrecisionPlan

MODEL_FILE = "model.onnx"


def export(config: OneRecV2Config, plan: PrecisionPlan, weight_files: Sequence[Path], dtype: str) -> Stitching:
    """Write the ONNX files of a bundle beside its weights, which they refer to.

    Args:
        weight_files: all in the directory to write to.
        dtype: see `build_graph`.

    Raises:
        EngineError: a plan that the graph cannot express, or a graph that ONNX's checker objects to.
    """
    register()
    directory = weight_files[0].parent
    model = build_graph(config, plan, bundle_tensors(weight_files), dtype)
    (directory / MODEL_FILE).write_bytes(model.SerializeToString(deterministic=True))
    stitching = split_graph(model, directory)
    for file in (directory / MODEL_FILE, *(segment.file for segment in stitching.segments)):
        try:
            # By path, so that the external data is checked too.
            onnx.checker.check_model(str(file), full_check=True, check_custom_domain=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise EngineError(f"{file.name}: not valid ONNX: {str(error).splitlines()[0]}") from error
    return stitching
