"""The tilings by name that the dense linear is tried with: those that won or came second anywhere on an H200.

Imports no Triton: a saved table is checked against these names anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY = float("inf")


@dataclass(frozen=True)
class Tiling:
    """How the kernel runs.

    Attributes:
        block_m, block_n: rows and weight rows of a program; from 64 rows Hopper's own instructions apply.
        k_bytes: bytes of K that a program loads at a time (128 values with block scales, whatever this says).
        warps, stages: of a program, and of its pipeline of loads.
        rows: fewest and most rows it is worth trying for; it computes any number.
    """

    block_m: int
    block_n: int
    k_bytes: int
    warps: int
    stages: int
    rows: tuple[int, float]


TILINGS: dict[str, Tiling] = {
    "triton_16x16": Tiling(16, 16, k_bytes=256, warps=4, stages=6, rows=(1, 16)),
    "triton_16x32": Tiling(16, 32, k_bytes=256, warps=4, stages=5, rows=(1, 32)),
    "triton_16x64": Tiling(16, 64, k_bytes=128, warps=4, stages=6, rows=(1, 32)),
    "triton_64x64": Tiling(64, 64, k_bytes=128, warps=4, stages=5, rows=(17, 1024)),
    "triton_64x128": Tiling(64, 128, k_bytes=128, warps=4, stages=4, rows=(17, 1024)),
    "triton_128x128": Tiling(128, 128, k_bytes=128, warps=8, stages=4, rows=(513, ANY)),  # where no library runs
}
