"""How kernels that go over whole rows (norm, quantization, context embedding) cut their work up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowTiling:
    """Rows of one program, a power of two, and its warps."""

    rows: int
    warps: int


CANDIDATES = tuple(RowTiling(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8) if rows <= warps)
"""What the benchmarks' sweeps try."""

MANY_ROWS = 2048


def row_tiling(rows: int, width: int) -> RowTiling:
    """The tiling for so many rows: one a program until the device is full, then several, with more loads in flight.

    The warps depend on the width alone: the sums of a row are added up in the same order whatever rows stand beside it.
    """
    several = 4 if width <= 2048 else 2 if width <= 4096 else 1  # more would not fit the registers
    return RowTiling(1 if rows < MANY_ROWS else several, 4 if width <= 2048 else 8)
