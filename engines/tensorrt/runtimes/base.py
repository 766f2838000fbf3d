"""What every runtime of dense segments takes and gives: segments, row profiles, plans, programs. Imports no torch.

A segment is an ONNX model without nodes of domain `loka`: all its inputs and outputs have the one dynamic dimension
`rows` first. A runtime builds it into a plan, which a bundle keeps, and loads the plan into a program, which runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bfloat16", "float16", "float32", "int32", "int64")
"""Names of the types of a segment's inputs and outputs, which are torch's and ONNX's (in lower case)."""
ROWS = "rows"
"""Name of the dynamic dimension."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: type, one of `DTYPES`, and shape without the leading dimension `rows`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A dense part of the graph.

    Attributes:
        name: unique in a bundle, of letters, digits, `_` and `-`: it names files.
        file: the ONNX model; its weights are external data in files of the same directory.
    """

    name: str
    file: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, order=True)
class RowProfile:
    """Row counts that a plan is optimised for together: at least `least`, at most `most`, best at `typical`."""

    least: int
    typical: int
    most: int


@dataclass(frozen=True)
class BuiltPlan:
    """What a build gives: the plan's bytes, and the timing cache that the next build starts from (empty: none)."""

    plan: bytes
    cache: bytes = b""


class Program(Protocol):
    """A loaded plan.

    Attributes:
        scratch_bytes: device memory that a run needs beside inputs, outputs and weights; 0 if the program has its own.
    """

    scratch_bytes: int

    def use_scratch(self, scratch: Tensor) -> None:
        """Memory of at least `scratch_bytes` bytes, uint8 on the device, shared by programs that never overlap."""
        ...

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], stream: int = 0) -> None:
        """Enqueue the segment: reads `inputs`, fills `outputs`, waits for nothing.

        May be captured into a CUDA graph, which then reads and writes these very addresses; a program keeps an
        execution context of its own for each captured number of rows.

        Args:
            inputs, outputs: contiguous tensors of the segment's names, types and shapes, all with the same rows.
            stream: a CUDA stream's handle (`torch.cuda.Stream.cuda_stream`); ignored on the CPU.

        Raises:
            EngineError: rows outside every profile of the plan.
        """
        ...


class SegmentRuntime(Protocol):
    """Builds and runs segments.

    Attributes:
        name: one of `RUNTIMES`.
        dtype: `bfloat16`, or `float32` where bfloat16 is carried in float32 with the same roundings.
    """

    name: str
    dtype: str

    def environment(self) -> dict[str, str]:
        """What plans are tied to, as a bundle records it: `version`, `gpu`, `compute_capability`, as far as they
        matter. A plan is only loaded where all are the same."""
        ...

    def build(self, segment: Segment, profiles: Sequence[RowProfile], cache: bytes = b"") -> BuiltPlan:
        """Compile a segment.

        Args:
            profiles: distinct and ascending; may overlap.
            cache: timing cache of an earlier build in this environment.

        Raises:
            EngineError: names the segment and what the builder objects to.
        """
        ...

    def load(self, segment: Segment, plan: bytes) -> Program:
        """Make a plan ready to run.

        Raises:
            EngineError: the plan is of another version or GPU, or damaged.
        """
        ...
