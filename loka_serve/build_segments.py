"""The build's share of the tensorrt engine: its runtime, asked for before anything is read, and its files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from loka_serve.build_config import BuildConfig
from loka_serve.config import LEAST_BEAM_LIMIT, SERVED_BATCH
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.buckets import Buckets
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.support import check_device
from loka_serve.engines.tensorrt.artifacts import build_artifacts
from loka_serve.engines.tensorrt.runtimes import make_runtime
from loka_serve.engines.tensorrt.runtimes.base import SegmentRuntime
from loka_serve.engines.tensorrt.support import check_recipe
from loka_serve.errors import EngineError
from loka_serve.models.config import OneRecV2Config
from loka_serve.quantization.plan import PrecisionPlan

RUN_ANYWHERE = ("onnxruntime", "torch")


@dataclass(frozen=True)
class SegmentBuild:
    """Builds segments with one runtime.

    Attributes:
        runs_here: plans run on the build's device, not only build there.
    """

    runtime: SegmentRuntime
    runs_here: bool

    @classmethod
    def of(cls, config: BuildConfig, device: torch.device) -> SegmentBuild:
        """Raises EngineError: a recipe that segments do not run, a runtime that is not installed, another GPU."""
        check_recipe(config.recipe)
        if find_spec("onnx") is None:
            raise EngineError("--engine tensorrt: ONNX is not installed: pip install 'loka-serve[onnxruntime]'")
        name = config.trt_runtime
        if name == "auto":
            name = "tensorrt" if device.type == "cuda" else "onnxruntime"
        if device.type == "cuda" and name != "tensorrt-rtx":
            check_device(device)
        # TensorRT-RTX refuses Hopper, where alone our kernels between the segments run.
        return cls(make_runtime(name, device), name in RUN_ANYWHERE or name == "tensorrt")

    def write(
        self,
        stage: Path,
        model: OneRecV2Config,
        plan: PrecisionPlan,
        bar: Callable[[str, int], AbstractContextManager[Callable[[int], object]]],
    ) -> None:
        """Write graph, segments and plans beside the weights of a bundle that is being built.

        Raises:
            EngineError: names the segment that the runtime does not build.
        """
        from loka_serve.engines.tensorrt.export import export  # needs onnx, which other engines do without

        stitching = export(model, plan, sorted(stage.glob("weights-*.safetensors")), self.runtime.dtype)
        limits = EngineLimits(SERVED_BATCH, max(model.beam_width, LEAST_BEAM_LIMIT), model.max_context, model.levels)
        with bar("build segments", len(stitching.segments)) as progress:
            build_artifacts(stage, stitching, self.runtime, Buckets.of(limits, HopperOptions()), progress)
