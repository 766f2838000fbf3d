"""How a launch of beam attention is cut up: what a call chooses by its shape, and the candidates for it.

Measured on an H200 for batch 8, 11 heads, 512 beams, 3001 slots: tiles of 64 rows and blocks of 128 slots, two programs
on a multiprocessor, so that one multiplies while the other takes exponentials. The split schedule keeps every
multiprocessor busy to the end but costs a second kernel and about a tenth of the loop's speed: it pays where whole
tiles would leave much of the last round idle.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """Shape of a launch.

    Attributes:
        block_rows: rows (beams x heads of a group) of a tile. From 64 on, 4 warps hold 64 rows (a warpgroup's product).
        block_slots: context slots of a block; divides `reference.SLOT_MULTIPLE`, at least 32 for E4M3.
        warps: of a program.
        stages: blocks of slots that are loaded ahead.
        programs_per_sm: programs of the split schedule on each multiprocessor; 0 gives every tile a program of its own,
            which makes a result independent of the rest of its batch.
        least_blocks: blocks that a program of the split schedule takes at least.
    """

    block_rows: int
    block_slots: int
    warps: int
    stages: int
    programs_per_sm: int
    least_blocks: int = 2


@dataclass(frozen=True)
class WarpSpecialized:
    """Shape of a launch of the kernel in CUDA C++, for E4M3 contexts and heads of 128: tiles and blocks of 128.

    Attributes:
        split: one program on each multiprocessor with equal shares; otherwise every tile has a program of its own.
        least_blocks: blocks that a program of the split schedule takes at least.
    """

    split: bool
    least_blocks: int = 2


# A beam or a few (the first level): reading the context bounds these, so small tiles and much in flight.
FEW_ROWS = Configuration(block_rows=16, block_slots=128, warps=4, stages=3, programs_per_sm=2)
WHOLE_TILES = Configuration(block_rows=64, block_slots=128, warps=4, stages=3, programs_per_sm=0)
SPLIT_TILES = Configuration(block_rows=64, block_slots=128, warps=4, stages=3, programs_per_sm=2)
IN_USE = (FEW_ROWS, WHOLE_TILES, SPLIT_TILES)

SHORT_SLOTS = 1024  # below, merging costs more than idle multiprocessors
LEAST_BUSY = 0.5  # of the rounds of whole tiles; at a third the split schedule is ahead, at two thirds whole tiles


def choose(rows: int, tasks: int, slots: int, multiprocessors: int) -> Configuration:
    """The configuration of a launch.

    Args:
        rows: beams x heads of a group.
        tasks: requests x groups, each with so many rows.
        slots: of the longest context.
    """
    if rows <= FEW_ROWS.block_rows:
        return FEW_ROWS
    tiles = tasks * -(-rows // WHOLE_TILES.block_rows)
    at_once = SPLIT_TILES.programs_per_sm * multiprocessors
    rounds = -(-tiles // at_once)
    return WHOLE_TILES if slots <= SHORT_SLOTS or tiles >= LEAST_BUSY * rounds * at_once else SPLIT_TILES


MANY_ROUNDS = 8  # of tiles of 128 rows, from which on the kernel in CUDA C++ is ahead; measured at 2.7 and 10.7


def choose_fp8(rows: int, tasks: int, slots: int, multiprocessors: int) -> Configuration | WarpSpecialized:
    """As `choose`, for E4M3 contexts of heads that the kernel in CUDA C++ takes."""
    tiles = tasks * -(-rows // 128)
    if slots > SHORT_SLOTS and tiles >= MANY_ROUNDS * multiprocessors:
        return WarpSpecialized(split=True)
    return choose(rows, tasks, slots, multiprocessors)


FEW_ROWS_CANDIDATES = tuple(
    Configuration(16, block_slots, 4, stages, programs_per_sm)
    for block_slots in (64, 128)
    for stages in (2, 3)
    for programs_per_sm in (1, 2, 3)
)
CANDIDATES = tuple(
    Configuration(block_rows, block_slots, block_rows // 16, stages, programs_per_sm)
    for block_rows, block_slots, stages in ((128, 64, 3), (128, 128, 3), (64, 64, 3), (64, 128, 2), (64, 128, 3))
    for programs_per_sm in (0, 128 // block_rows)
)
"""For many rows. A warpgroup holds 64 rows; the split schedule has as many programs as fit a multiprocessor."""
WARP_SPECIALIZED = (WarpSpecialized(split=False), WarpSpecialized(split=True))
