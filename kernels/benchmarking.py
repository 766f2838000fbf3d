"""Timing of kernels on a CUDA device, and the row that every benchmark reports."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .quantize.tilings import CANDIDATES, RowTiling, row_tiling

ROW_COUNTS = (1, 8, 64, 512, 4096, 16384)
"""Rows of an activation that kernels are timed at."""
D_MODEL = 1408  # onerec-v2-4b-a0.5b

L2_BYTES = 60 << 20  # of an H200; inputs rotate through more than that, so that no call finds its input cached


@dataclass(frozen=True)
class KernelRow:
    """One operation at one shape, beside the best library that does the same.

    Attributes:
        us, baseline_us: median microseconds of a call.
        tflops, gb_per_s: the operation's arithmetic and its compulsory traffic over `us`.
        ratio: baseline_us / us.
        max_error: largest relative Frobenius error, or largest difference for exact operations.
    """

    op: str
    shape: str
    us: float
    tflops: float
    gb_per_s: float
    baseline: str
    baseline_us: float
    ratio: float
    max_error: float


def make_row(
    op: str, shape: str, us: float, flops: float, traffic: float, baseline: tuple[str, float], max_error: float
) -> KernelRow:
    """A row from raw figures; `flops` operations and `traffic` bytes a call; `baseline` is (name, microseconds)."""
    name, baseline_us = baseline
    return KernelRow(
        op=op,
        shape=shape,
        us=round(us, 2),
        tflops=round(flops / us / 1e6, 2),
        gb_per_s=round(traffic / us / 1e3, 1),
        baseline=name,
        baseline_us=round(baseline_us, 2),
        ratio=round(baseline_us / us, 3),
        max_error=max_error,
    )


def copies_beyond_l2(tensor_bytes: int, at_most: int = 32) -> int:
    """How many input sets of that size to rotate through."""
    return max(2, min(at_most, -(-2 * L2_BYTES // max(tensor_bytes, 1))))


def time_us(call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], repeats: int = 25) -> float:
    """Median microseconds of `call(*one_input)`: one CUDA graph runs it on each input in turn, events time its replays.

    Outputs stay alive until the end of a replay, so that calls do not write over each other's results.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # where the inputs may still be in the making
    with torch.cuda.stream(stream):
        for arguments in inputs[:2]:
            call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call(*arguments) for arguments in inputs]
    durations = []
    for _ in range(3):
        graph.replay()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        durations.append(1e3 * start.elapsed_time(end) / len(inputs))
    del kept
    return statistics.median(durations)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under torch.compile, with room for every variant: beyond a limit it would silently run eagerly."""
    import torch._dynamo  # takes seconds, and only benchmarks need it

    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    return torch.compile(function)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Float32 values [rows, width] of E4M3 codes with a scale a row or a 1 x 128 block."""
    wide = scale[:, None] if scale.ndim == 1 else scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.float() * wide


def scale_bytes(rows: int, width: int, block_scales: bool) -> int:
    """Bytes of an activation's scales."""
    return 4 * rows * (-(-width // 128) if block_scales else 1)


def print_sweep(
    op: str, shape: str, rows: int, width: int, traffic: float, call: Callable[..., Any], inputs: Sequence[Any]
) -> None:
    """Print a JSON line for each row tiling: `call(*one_input, tiling=tiling)`; `chosen` marks what the table has."""
    for tiling in CANDIDATES:

        def tiled(*arguments: Any, tiling: RowTiling = tiling) -> Any:
            return call(*arguments, tiling=tiling)

        us = time_us(tiled, inputs)
        record = {
            "op": op,
            "shape": shape,
            "rows": tiling.rows,
            "warps": tiling.warps,
            "us": round(us, 2),
            "gb_per_s": round(traffic / us / 1e3, 1),
            "chosen": tiling == row_tiling(rows, width),
        }
        print(json.dumps(record), flush=True)
