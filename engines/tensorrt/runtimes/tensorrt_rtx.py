"""TensorRT-RTX: builds plans on any machine, without a GPU too, for compute capabilities that are named; not for 9.0.

Its kernels are compiled where the plan is loaded, so one plan serves every GPU that it names.
"""

from __future__ import annotations

from typing import Any

import torch

from loka_serve.engines.tensorrt.runtimes.base import Segment
from loka_serve.engines.tensorrt.runtimes.nvidia import NvidiaProgram, NvidiaRuntime
from loka_serve.errors import EngineError

INSTALL = "pip install 'loka-serve[tensorrt-rtx]'"
CAPABILITIES = ("8.9", "12.0")
"""Those with FP8 that the library takes: Ada and the Blackwell of workstations."""


class TensorRTRtxProgram(NvidiaProgram):
    """Kernels for a context's shapes are compiled when it is made, not in the background while requests wait."""

    def _create_context(self) -> Any:
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self.api.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = self.api.DynamicShapesKernelSpecializationStrategy.EAGER
        return self.engine.create_execution_context(config)


class TensorRTRtxRuntime(NvidiaRuntime):
    """Plans are tied to this version, and run on the capabilities that they were built for.

    Args:
        capabilities: to build for, as `8.9`.

    Raises:
        EngineError: TensorRT-RTX is not installed; a capability that it does not know.
    """

    name = "tensorrt-rtx"
    program_type = TensorRTRtxProgram

    def __init__(self, capabilities: tuple[str, ...] = CAPABILITIES) -> None:
        try:
            import tensorrt_rtx
        except (ImportError, OSError) as error:
            raise EngineError(f"TensorRT-RTX is not installed ({error}): {INSTALL}") from error
        super().__init__(tensorrt_rtx)
        known = {_text(name): value for name, value in self.api.ComputeCapability.__members__.items() if "SM" in name}
        unknown = [capability for capability in capabilities if capability not in known]
        if unknown or not capabilities:
            raise EngineError(
                f"TensorRT-RTX {self.api.__version__}: compute capability {', '.join(unknown) or 'none'}: expected "
                f"some of {', '.join(known)}"
            )
        self.capabilities = capabilities
        self._targets = [known[capability] for capability in capabilities]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "compute_capabilities": ",".join(self.capabilities)}

    def load(self, segment: Segment, plan: bytes) -> NvidiaProgram:
        if not torch.cuda.is_available():
            raise EngineError("TensorRT-RTX loads plans on a GPU, and this machine has none that torch can use")
        return super().load(segment, plan)

    def _configure(self, config: Any) -> None:
        config.num_compute_capabilities = len(self._targets)
        for index, target in enumerate(self._targets):
            config.set_compute_capability(target, index)

    def _start_from(self, config: Any, cache: bytes) -> None:
        """It times nothing while it builds."""

    def _timings(self, config: Any) -> bytes:
        return b""


def _text(member: str) -> str:
    """`SM120` -> `12.0`."""
    digits = member.removeprefix("SM")
    return f"{digits[:-1]}.{digits[-1]}"
