"""Radix top-k on a CUDA device: one pass over device memory, exact and sorted. The kernels are in radix_topk.cu.

Short rows are held in registers, one by a block at a time. Long rows are sampled for a threshold that slightly more
than k elements reach, collected against it in one pass, and selected among the collected; a row where the guess fails
is read again. Nothing synchronises with the host, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from loka_serve.kernels.nvrtc import Argument, Kernel, compile_kernel

SOURCE = Path(__file__).with_name("radix_topk.cu")
MAX_K = 1024
MAX_COLUMNS = 2**31 - 1
COLLECTED_ROOM = 8192  # elements of a long row that may reach the threshold
BLOCKS_WANTED = 1024
MIN_STRETCH = 64  # a long row gives one sampled run of 32 elements for each stretch; see topk_sample_threshold


@dataclass(frozen=True)
class Configuration:
    """Compile-time shape of a kernel: threads a block, elements a thread, candidates, blocks to fit a multiprocessor.

    Attributes:
        group: neighbours of which topk_short_rows takes a maximum.
        resident: whether topk_short_rows starts only the blocks that fit at once, each for many rows.
    """

    threads: int
    items: int
    capacity: int
    blocks_per_sm: int
    log2_bins: int = 11
    group: int = 4
    resident: bool = False

    @property
    def columns(self) -> int:
        return self.threads * self.items

    def holds(self, columns: int, k: int) -> bool:
        """Whether topk_short_rows takes such rows."""
        return columns <= self.columns and 2 * k <= self.capacity

    def definitions(self) -> tuple[tuple[str, int], ...]:
        return (
            ("THREADS", self.threads),
            ("ITEMS", self.items),
            ("CAPACITY", self.capacity),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("LOG2_BINS", self.log2_bins),
            ("GROUP", self.group),
            ("RESIDENT", int(self.resident)),
        )


# Smallest first: a row goes to the first configuration that holds it.
SHORT_ROWS = (
    Configuration(threads=256, items=4, capacity=1024, blocks_per_sm=6),
    Configuration(threads=256, items=16, capacity=1024, blocks_per_sm=5),
    Configuration(threads=256, items=32, capacity=1024, blocks_per_sm=4, log2_bins=10, group=8),
    Configuration(threads=512, items=32, capacity=1024, blocks_per_sm=2),
    Configuration(threads=1024, items=16, capacity=2048, blocks_per_sm=1),
    Configuration(threads=1024, items=32, capacity=2048, blocks_per_sm=1),
)
LONG_ROWS = Configuration(threads=1024, items=16, capacity=2048, blocks_per_sm=1)
COLLECT = Configuration(threads=512, items=16, capacity=1024, blocks_per_sm=2)


def radix_topk(
    scores: Tensor, k: int, row_k: Tensor | None = None, configuration: Configuration | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.radix_topk`, with int32 indices and the widest k given as a number, so that no value is read back.

    Args:
        scores: float32 [rows, columns] on a CUDA device; rows may be strided, columns are contiguous.
        k: entries written for each row, 0 to MAX_K.
        row_k: int32 [rows], entries wanted of each row, clipped to 0..k; the rest is -inf and -1.
        configuration: of topk_short_rows, for measurements; by default the first of SHORT_ROWS that fits.

    Returns:
        values float32 [rows, k] and indices int32 [rows, k].
    """
    rows, columns = scores.shape
    if not scores.is_cuda or scores.dtype != torch.float32 or (columns > 1 and scores.stride(1) != 1):
        raise ValueError("scores: expected float32 on a CUDA device with contiguous columns")
    if not 0 <= k <= MAX_K or not columns <= MAX_COLUMNS:
        raise ValueError(f"k = {k}, columns = {columns}: expected k in 0..{MAX_K} and columns in 0..{MAX_COLUMNS}")
    if row_k is not None and (row_k.shape != (rows,) or row_k.dtype != torch.int32 or row_k.device != scores.device):
        raise ValueError(f"row_k: expected int32 [{rows}] on {scores.device}")
    values = torch.empty(rows, k, device=scores.device)
    indices = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if not rows or not k:
        return values, indices
    if not columns:
        return values.fill_(float("-inf")), indices.fill_(-1)
    ragged = (indices, 0) if row_k is None else (row_k, 1)
    fitting = configuration or next((one for one in SHORT_ROWS if one.holds(columns, k)), None)
    if fitting:
        if not fitting.holds(columns, k):
            raise ValueError(f"{fitting} does not hold {columns} columns with k = {k}")
        _short_rows(fitting, scores, k, ragged, values, indices)
    else:
        _long_rows(scores, k, ragged, values, indices)
    return values, indices


def _short_rows(
    configuration: Configuration, scores: Tensor, k: int, ragged: tuple[Tensor, int], values: Tensor, indices: Tensor
) -> None:
    rows = scores.shape[0]
    blocks = rows
    if configuration.resident:
        blocks = min(rows, configuration.blocks_per_sm * _multiprocessors(scores.device.index))
    kernel = _kernel("topk_short_rows", configuration, scores)
    _launch(kernel, configuration, (blocks, 1, 1), scores, [rows, k, *ragged, values, indices])


@cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _long_rows(scores: Tensor, k: int, ragged: tuple[Tensor, int], values: Tensor, indices: Tensor) -> None:
    rows, columns = scores.shape
    thresholds = torch.empty(rows, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows, dtype=torch.int32, device=scores.device)
    collected = torch.empty(rows, COLLECTED_ROOM, dtype=torch.int64, device=scores.device)
    sampled = LONG_ROWS.columns
    if columns // (sampled // 32) >= MIN_STRETCH:
        # Of the k best, `expected` are sampled on average; five standard deviations above makes a miss rare.
        expected = k * sampled / columns
        rank = min(math.ceil(expected + 5 * math.sqrt(expected) + 6), LONG_ROWS.threads)
        kernel = _kernel("topk_sample_threshold", LONG_ROWS, scores)
        _launch(kernel, LONG_ROWS, (rows, 1, 1), scores, [rank, thresholds, counts])
        per_block = _columns_per_block(rows, columns)
        grid = (-(-columns // per_block), rows, 1)
        kernel = _kernel("topk_collect", COLLECT, scores)
        _launch(kernel, COLLECT, grid, scores, [per_block, thresholds, counts, collected, COLLECTED_ROOM])
    else:
        counts.zero_()  # too short to sample: read by topk_finish as a failed guess
    kernel = _kernel("topk_finish", LONG_ROWS, scores)
    arguments: list[Argument] = [k, *ragged, thresholds, counts, collected, COLLECTED_ROOM, values, indices]
    _launch(kernel, LONG_ROWS, (rows, 1, 1), scores, arguments)


def _columns_per_block(rows: int, columns: int) -> int:
    """Enough blocks to fill the device several times, each with a few unrolled iterations to keep loads in flight."""
    iteration = 4 * COLLECT.threads * 4  # columns that topk_collect's unrolled loop takes at once
    iterations = rows * columns // (BLOCKS_WANTED * iteration)
    return iteration * max(1, min(iterations, 8))


def _kernel(name: str, configuration: Configuration, scores: Tensor) -> Kernel:
    return compile_kernel(SOURCE, name, configuration.definitions(), scores.device.index)


def _launch(
    kernel: Kernel, configuration: Configuration, grid: tuple[int, int, int], scores: Tensor, arguments: list[Argument]
) -> None:
    leading: list[Argument] = [scores, scores.shape[1], scores.stride(0)]
    kernel(grid=grid, block=(configuration.threads, 1, 1), args=leading + arguments)
