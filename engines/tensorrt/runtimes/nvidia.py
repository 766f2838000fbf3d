"""What TensorRT and TensorRT-RTX share: building a segment into a plan, and running it on a CUDA stream.

Nothing here waits for the device. Memory that contexts need beside weights is the caller's, one block for all programs,
which run one after another; a context belongs to one number of rows, so that a captured graph keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from loka_serve.engines.tensorrt.runtimes.base import BuiltPlan, RowProfile, Segment
from loka_serve.engines.tensorrt.runtimes.network import ErrorLog, parse_segment
from loka_serve.errors import EngineError


class NvidiaProgram:
    """A deserialized plan with an execution context for each number of rows that it was asked to run."""

    def __init__(self, api: Any, segment: Segment, engine: Any, log: ErrorLog) -> None:
        self.api, self.segment, self.engine, self.log = api, segment, engine, log
        self.scratch_bytes = int(engine.device_memory_size_v2)
        self._scratch: Tensor | None = None
        self._contexts: dict[int, Any] = {}
        # A network whose inputs have no rows has no profile shapes; a segment always has.
        name = segment.inputs[0].name
        self.profiles = tuple(
            RowProfile(*(int(shape[0]) for shape in engine.get_tensor_profile_shape(name, index)))
            for index in range(engine.num_optimization_profiles)
        )

    def use_scratch(self, scratch: Tensor) -> None:
        if scratch.nbytes < self.scratch_bytes:
            raise EngineError(
                f"segment {self.segment.name}: {scratch.nbytes} bytes of scratch: expected {self.scratch_bytes}"
            )
        self._scratch = scratch
        for context in self._contexts.values():
            context.set_device_memory(scratch.data_ptr(), scratch.nbytes)

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], stream: int = 0) -> None:
        rows = next(iter(inputs.values())).shape[0]
        context = self._contexts.get(rows) or self._new_context(rows, stream)
        for name, tensor in (*inputs.items(), *outputs.items()):
            context.set_tensor_address(name, tensor.data_ptr())
        if not context.execute_async_v3(stream):
            raise EngineError(f"segment {self.segment.name}, {rows} rows: {self.log.last_error('it did not start')}")

    def describe(self) -> str:
        """What the library's inspector says of the plan, as JSON."""
        inspector = self.engine.create_engine_inspector()
        return str(inspector.get_engine_information(self.api.LayerInformationFormat.JSON))

    def _new_context(self, rows: int, stream: int) -> Any:
        fitting = [index for index, profile in enumerate(self.profiles) if profile.least <= rows <= profile.most]
        if not fitting:
            most = max(profile.most for profile in self.profiles)
            raise EngineError(
                f"segment {self.segment.name}: {rows} rows are outside its plan's profiles, which end at {most}: "
                "serve within the limits that the bundle was built for, or build it again"
            )
        profile = min(fitting, key=lambda index: (abs(self.profiles[index].typical - rows), index))
        context = self._create_context()
        if context is None:
            raise EngineError(f"segment {self.segment.name}: {self.log.last_error('no execution context')}")
        context.set_optimization_profile_async(profile, stream)
        for spec in self.segment.inputs:
            context.set_input_shape(spec.name, (rows, *spec.shape))
        if self.scratch_bytes:
            if self._scratch is None:
                self._scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device="cuda")
            context.set_device_memory(self._scratch.data_ptr(), self._scratch.nbytes)
        self._contexts[rows] = context
        return context

    def _create_context(self) -> Any:
        return self.engine.create_execution_context(self.api.ExecutionContextAllocationStrategy.USER_MANAGED)


class NvidiaRuntime:
    """Builds and loads plans with one of the two libraries.

    Args:
        api: the imported module.
    """

    name: str
    dtype = "bfloat16"
    program_type: type[NvidiaProgram] = NvidiaProgram

    def __init__(self, api: Any) -> None:
        self.api = api

    def environment(self) -> dict[str, str]:
        return {"version": str(self.api.__version__)}

    def build(self, segment: Segment, profiles: Sequence[RowProfile], cache: bytes = b"") -> BuiltPlan:
        parsed = parse_segment(self.api, segment)
        config = parsed.builder.create_builder_config()
        config.profiling_verbosity = self.api.ProfilingVerbosity.DETAILED  # for the inspector; costs no time
        self._configure(config)
        for profile in profiles:
            shapes = parsed.builder.create_optimization_profile()
            for spec in segment.inputs:
                rows = ((count, *spec.shape) for count in (profile.least, profile.typical, profile.most))
                shapes.set_shape(spec.name, *rows)
            config.add_optimization_profile(shapes)
        self._start_from(config, cache)
        plan = parsed.builder.build_serialized_network(parsed.network, config)
        if plan is None:
            raise EngineError(f"segment {segment.name}: {self._title()}: {parsed.log.last_error('no plan was built')}")
        return BuiltPlan(bytes(plan), self._timings(config))

    def load(self, segment: Segment, plan: bytes) -> NvidiaProgram:
        log = ErrorLog(self.api)
        runtime = self.api.Runtime(log.logger)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise EngineError(
                f"segment {segment.name}: {self._title()} does not load its plan, which is damaged or of another "
                f"version or GPU ({log.last_error('no reason given')}): build the bundle again on this machine"
            )
        return self.program_type(self.api, segment, engine, log)

    def _configure(self, config: Any) -> None:
        """Settings of one of the libraries."""

    def _start_from(self, config: Any, cache: bytes) -> None:
        config.set_timing_cache(config.create_timing_cache(cache), ignore_mismatch=True)

    def _timings(self, config: Any) -> bytes:
        kept = config.get_timing_cache()
        return b"" if kept is None else bytes(kept.serialize())

    def _title(self) -> str:
        return f"{self.name} {self.api.__version__}"
