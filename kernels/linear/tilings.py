"""The tilings by name that the dense linear is tried with."""

from __future__ import annotations

from ..moe.experts import Tiling as GroupedTiling
from .triton import Tiling

ANY = float("inf")

TILINGS: dict[str, Tiling] = {
    "triton_16x16": Tiling(16, 16, k_bytes=256, warps=4, stages=6, rows=(1, 16)),
    "triton_16x32": Tiling(16, 32, k_bytes=256, warps=4, stages=5, rows=(1, 32)),
    "triton_16x64": Tiling(16, 64, k_bytes=128, warps=4, stages=6, rows=(1, 32)),
    "triton_64x16": Tiling(64, 16, k_bytes=128, warps=4, stages=6, rows=(1, 128)),
    "triton_64x32": Tiling(64, 32, k_bytes=128, warps=4, stages=6, rows=(1, 256)),
    "triton_64x64": Tiling(64, 64, k_bytes=128, warps=4, stages=5, rows=(17, 1024)),
    "triton_64x128": Tiling(64, 128, k_bytes=128, warps=4, stages=4, rows=(17, 2048)),
    "triton_128x128": Tiling(128, 128, k_bytes=128, warps=8, stages=4, rows=(129, ANY)),
}
# Two float32 sums of this tile, the running one and a slice's, would not fit the registers, so BF16 alone has it.
BF16_TILINGS: dict[str, Tiling] = {
    **TILINGS,
    "triton_128x256": Tiling(128, 256, k_bytes=128, warps=8, stages=3, rows=(512, ANY)),
}
GROUPED_TILINGS: dict[str, GroupedTiling] = {
    "grouped_64": GroupedTiling(64, warps=4, stages=3, paired=True),
    "grouped_128": GroupedTiling(128, warps=8, stages=4, paired=True),
}


def tilings_of(recipe: str) -> dict[str, Tiling]:
    """The tilings by name that exist for a recipe."""
    return BF16_TILINGS if recipe == "bf16" else TILINGS
