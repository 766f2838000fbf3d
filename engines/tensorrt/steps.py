"""What the stitched executor does, in order: segments and operations on named values. Imports no onnx, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loka_serve.engines.tensorrt.runtimes.base import Segment, TensorSpec

BATCH, BEAMS, CONTEXT = "batch", "beam_rows", "context_rows"
"""The graph's dynamic first dimensions: requests; batch x beams; batch x (1 + items)."""


@dataclass(frozen=True)
class SegmentStep:
    """Run a segment.

    Attributes:
        inputs, outputs: the graph's values, in the order of the segment's own inputs and outputs.
        rows: the graph's dynamic dimension that is the segment's `rows` here.
    """

    segment: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: str


@dataclass(frozen=True)
class OperationStep:
    """Run a node of domain `loka`; an input of "" is one that is left out, weights are not among them."""

    operation: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Stitching:
    """A graph taken apart.

    Attributes:
        outputs: values that the graph gives: nodes, scores, counts, failed.
    """

    segments: tuple[Segment, ...]
    steps: tuple[SegmentStep | OperationStep, ...]
    outputs: tuple[str, ...]

    def rows_of(self, segment: str) -> set[str]:
        """Dynamic dimensions that are a segment's rows somewhere."""
        return {step.rows for step in self.steps if isinstance(step, SegmentStep) and step.segment == segment}

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON; files by name."""
        return {
            "segments": [{**asdict(segment), "file": segment.file.name} for segment in self.segments],
            "steps": [asdict(step) for step in self.steps],
            "outputs": list(self.outputs),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], directory: Path) -> Stitching:
        """Inverse of `to_dict`; raises KeyError, TypeError or ValueError for another form."""
        segments = tuple(
            Segment(
                entry["name"], directory / Path(entry["file"]).name, _specs(entry["inputs"]), _specs(entry["outputs"])
            )
            for entry in values["segments"]
        )
        return cls(segments, tuple(_step(entry) for entry in values["steps"]), tuple(values["outputs"]))


def _specs(entries: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"])) for entry in entries)


def _step(entry: Mapping[str, Any]) -> SegmentStep | OperationStep:
    inputs, outputs = tuple(entry["inputs"]), tuple(entry["outputs"])
    if "segment" in entry:
        return SegmentStep(entry["segment"], inputs, outputs, entry["rows"])
    return OperationStep(entry["operation"], inputs, outputs, dict(entry["attributes"]))
