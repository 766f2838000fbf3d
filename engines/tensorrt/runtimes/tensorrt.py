"""TensorRT 10 and 11: builds and runs plans on the GPU at hand, Hopper included."""

from __future__ import annotations

import torch

from loka_serve.engines.tensorrt.runtimes.nvidia import NvidiaRuntime
from loka_serve.errors import EngineError

INSTALL = "pip install 'loka-serve[tensorrt]', which needs an NVIDIA GPU and its driver"


class TensorRTRuntime(NvidiaRuntime):
    """Plans are tied to this version and this kind of GPU.

    Raises:
        EngineError: TensorRT is not installed, or there is no GPU; says what is needed.
    """

    name = "tensorrt"

    def __init__(self) -> None:
        try:
            import tensorrt
        except (ImportError, OSError) as error:  # the bindings without the libraries raise either
            raise EngineError(f"TensorRT is not installed ({error}): {INSTALL}") from error
        if not torch.cuda.is_available():
            raise EngineError("TensorRT builds and runs on a GPU, and this machine has none that torch can use")
        super().__init__(tensorrt)

    def environment(self) -> dict[str, str]:
        major, minor = torch.cuda.get_device_capability()
        return {
            "version": str(self.api.__version__),
            "gpu": torch.cuda.get_device_name(),
            "compute_capability": f"{major}.{minor}",
        }
