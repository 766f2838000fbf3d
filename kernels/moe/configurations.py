"""Which implementations the two GEMMs run with: the tables that a call chooses from by its rows an expert.

Fill them from `sweep.py`: at each number of tokens the fastest pair of one block_m, whose times add up, and the library
where it wins by more than its extra launch. An entry that names the library is passed over where that is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cuda import WarpSpecialized
from .experts import Implementation, Tiling
from .libraries import DeepGemm


@dataclass(frozen=True)
class Configuration:
    """Implementations of the two GEMMs, which share the blocks that rows are sorted into."""

    gate_up: Implementation
    down: Implementation

    def __post_init__(self) -> None:
        if self.gate_up.block_m != self.down.block_m:
            raise ValueError(f"gate_up in blocks of {self.gate_up.block_m} rows, down of {self.down.block_m}")
        if len({use for use in (self.gate_up, self.down) if isinstance(use, DeepGemm)}) > 1:
            raise ValueError("gate_up and down take the groups of their rows in two ways")

    @property
    def warp_specialized(self) -> bool:
        """Whether a GEMM runs in the kernel in CUDA C++."""
        return isinstance(self.gate_up, WarpSpecialized) or isinstance(self.down, WarpSpecialized)

    @property
    def library(self) -> DeepGemm | None:
        """How it uses the library, None where it does not."""
        return next((use for use in (self.gate_up, self.down) if isinstance(use, DeepGemm)), None)


Table = tuple[tuple[float, Configuration], ...]

# For at most so many rows an expert (on average), measured on an H200. Few rows: the weights' traffic is the cost, and
# small blocks waste the least. Many rows: the largest tile whose sums fit the registers.
FP8_GATE_UP = Tiling(128, warps=8, stages=3, persistent=1, described=True)
FP8_CONFIGURATIONS: Table = (
    (8, Configuration(Tiling(16, warps=4, stages=4, described=True), Tiling(16, warps=4, stages=3))),
    (
        96,
        Configuration(
            Tiling(64, warps=8, stages=4, persistent=1, described=True), Tiling(64, warps=4, stages=3, described=True)
        ),
    ),
    (float("inf"), Configuration(WarpSpecialized(group_m=2), DeepGemm())),
    (float("inf"), Configuration(WarpSpecialized(group_m=2), WarpSpecialized(group_m=2))),
    (float("inf"), Configuration(FP8_GATE_UP, Tiling(128, warps=8, stages=3, paired=True, described=True))),
)
BF16_GATE_UP = Tiling(128, warps=8, stages=4, described=True)
BF16_DOWN = Tiling(128, warps=8, stages=3, described=True)
BF16_CONFIGURATIONS: Table = (
    (8, Configuration(Tiling(16, warps=4, stages=3), Tiling(16, warps=4, stages=5))),
    (96, Configuration(Tiling(64, warps=8, stages=4, described=True), Tiling(64, warps=4, stages=3))),
    (600, Configuration(BF16_GATE_UP, BF16_DOWN)),
    (float("inf"), Configuration(BF16_GATE_UP, DeepGemm())),
    (float("inf"), Configuration(BF16_GATE_UP, BF16_DOWN)),
)


def choose_configuration(
    rows: int,
    experts: int,
    fp8: bool,
    library: bool = False,
    warp_specialized: bool = False,
    table: Table | None = None,
) -> Configuration:
    """The entry for so many (token, slot) rows over so many experts; known from shapes, fixed at capture.

    Args:
        library: whether entries may use the library, see `libraries.deep_gemm_takes`.
        warp_specialized: whether they may use the kernel in CUDA C++, see `cuda.warp_specialized_takes`.
        table: in the place of the recipe's own.
    """
    if table is None:
        table = FP8_CONFIGURATIONS if fp8 else BF16_CONFIGURATIONS
    return next(
        configuration
        for limit, configuration in table
        if rows <= limit * experts
        and (library or configuration.library is None)
        and (warp_specialized or not configuration.warp_specialized)
    )
