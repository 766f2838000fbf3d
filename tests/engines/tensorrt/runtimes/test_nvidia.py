"""What a program of TensorRT asks of the library: a context a number of rows, the nearest profile, one scratch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loka_serve.engines.tensorrt.runtimes.base import Segment, TensorSpec
from loka_serve.engines.tensorrt.runtimes.nvidia import NvidiaProgram, NvidiaRuntime
from loka_serve.engines.tensorrt.runtimes.tensorrt import TensorRTRuntime
from loka_serve.errors import EngineError

SEGMENT = Segment("part", Path("part.onnx"), (TensorSpec("x", "float32", (4,)),), (TensorSpec("y", "float32", (2,)),))
API = SimpleNamespace(ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"))


class RecordingContext:
    """An execution context that keeps what it was told; it can refuse to start."""

    def __init__(self, starts: bool) -> None:
        self.starts = starts
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def execute_async_v3(self, stream: int) -> bool:
        self.calls.append(("execute_async_v3", stream))
        return self.starts


class RecordingEngine:
    """Profiles of 1 to 8 rows, typically 1, and of 4 to 64 rows, typically 32; 1000 bytes of scratch."""

    device_memory_size_v2 = 1000
    num_optimization_profiles = 2

    def __init__(self, starts: bool = True) -> None:
        self.starts = starts
        self.contexts: list[RecordingContext] = []

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        assert name == "x"
        return [(rows, 4) for rows in ((1, 1, 8), (4, 32, 64))[index]]

    def create_execution_context(self, strategy: str) -> RecordingContext:
        assert strategy == "user managed"
        self.contexts.append(RecordingContext(self.starts))
        return self.contexts[-1]


def program_of(engine: RecordingEngine) -> NvidiaProgram:
    log = SimpleNamespace(last_error=lambda otherwise: otherwise)
    program = NvidiaProgram(API, SEGMENT, engine, log)  # type: ignore[arg-type]
    program.use_scratch(torch.empty(2000, dtype=torch.uint8))
    return program


def run(program: NvidiaProgram, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.zeros(rows, 4), torch.zeros(rows, 2)
    program.run({"x": x}, {"y": y}, stream=7)
    return x, y


def test_a_number_of_rows_keeps_its_context() -> None:
    engine = RecordingEngine()
    program = program_of(engine)
    x, y = run(program, 5)
    expected = [
        ("set_optimization_profile_async", 0, 7),
        ("set_input_shape", "x", (5, 4)),
        ("set_device_memory", program._scratch.data_ptr() if program._scratch is not None else 0, 2000),
        ("set_tensor_address", "x", x.data_ptr()),
        ("set_tensor_address", "y", y.data_ptr()),
        ("execute_async_v3", 7),
    ]
    assert engine.contexts[0].calls == expected
    run(program, 5)
    assert len(engine.contexts) == 1 and len(engine.contexts[0].calls) == len(expected) + 3
    run(program, 40)
    assert len(engine.contexts) == 2


@pytest.mark.parametrize(("rows", "profile"), [(1, 0), (4, 0), (8, 0), (9, 1), (64, 1)])
def test_the_profile_that_is_nearest_is_taken(rows: int, profile: int) -> None:
    engine = RecordingEngine()
    run(program_of(engine), rows)
    assert engine.contexts[0].calls[0] == ("set_optimization_profile_async", profile, 7)


def test_rows_beyond_every_profile_are_refused() -> None:
    program = program_of(RecordingEngine())
    with pytest.raises(EngineError, match="segment part: 65 rows are outside its plan's profiles, which end at 64"):
        run(program, 65)


def test_a_run_that_does_not_start_is_an_error() -> None:
    with pytest.raises(EngineError, match="segment part, 3 rows: it did not start"):
        run(program_of(RecordingEngine(starts=False)), 3)


def test_scratch_must_be_large_enough_and_may_be_exchanged() -> None:
    engine = RecordingEngine()
    program = program_of(engine)
    run(program, 5)
    with pytest.raises(EngineError, match="segment part: 999 bytes of scratch: expected 1000"):
        program.use_scratch(torch.empty(999, dtype=torch.uint8))
    scratch = torch.empty(1000, dtype=torch.uint8)
    program.use_scratch(scratch)
    assert engine.contexts[0].calls[-1] == ("set_device_memory", scratch.data_ptr(), 1000)


class RecordingConfig:
    """A builder's configuration that starts from a timing cache and gives a longer one back."""

    def __init__(self) -> None:
        self.cache = b""

    def create_timing_cache(self, content: bytes) -> bytes:
        return content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> None:
        assert ignore_mismatch
        self.cache = cache

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: bytearray(self.cache + b" and more"))


def test_the_next_build_starts_from_what_the_last_one_timed() -> None:
    runtime, config = NvidiaRuntime(SimpleNamespace(__version__="11.4")), RecordingConfig()
    runtime._start_from(config, b"earlier")
    assert runtime._timings(config) == b"earlier and more"
    assert runtime.environment() == {"version": "11.4"}


def test_a_plan_that_does_not_load_is_said_to_be_of_another_version() -> None:
    class Refusing:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, plan: bytes) -> None:
            self.logger.log(1, "version 10.9 found,\n expected 11.4")

    severities = {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2, "__init__": lambda self: None}
    api = SimpleNamespace(__version__="11.4", ILogger=type("ILogger", (), severities), Runtime=Refusing)
    runtime = NvidiaRuntime(api)
    runtime.name = "tensorrt"
    expected = (
        r"segment part: tensorrt 11.4 does not load its plan, .*\(version 10.9 found, expected 11.4\): build the bundle"
    )
    with pytest.raises(EngineError, match=expected):
        runtime.load(SEGMENT, b"plan")


def test_without_tensorrt_or_a_gpu_it_says_what_is_needed() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match=r"pip install 'loka-serve\[tensorrt\]'|this machine has none"):
        TensorRTRuntime()
