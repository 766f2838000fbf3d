"""How a launch of beam attention is cut up: the table that a call chooses from by its shape, and the candidates for it.

Counting for batch 8, 11 heads, 512 beams, 3001 slots on 132 multiprocessors: 352 tiles of 128 rows are 2.67 for each,
so whole tiles finish in 3 rounds (89 % busy), and neither 64-row tiles (704: 5.33) nor halves of the context (704)
change that. The split schedule gives each program 126 of 16,544 blocks of 64 slots (99.5 % busy) and cuts about 130
tiles in two for it: 17 MB of float32 parts, written and read again within L2.
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
        ahead: scores are computed a block ahead of the softmax, so that both run at once; the keys of a block are then
            read again as values.
        programs_per_sm: programs of the split schedule on each multiprocessor; 0 gives every tile a program of its own,
            which makes a result independent of the rest of its batch.
        least_blocks: blocks that a program of the split schedule takes at least.
        registers: cap for a thread; None leaves it to the compiler.
    """

    block_rows: int
    block_slots: int
    warps: int
    stages: int
    ahead: bool
    programs_per_sm: int
    least_blocks: int = 2
    registers: int | None = None


# A beam or a few (the first level): reading the context bounds these, so small tiles and much in flight.
FEW_ROWS = Configuration(block_rows=16, block_slots=128, warps=4, stages=2, ahead=False, programs_per_sm=3)
SOME_ROWS = Configuration(block_rows=64, block_slots=64, warps=4, stages=2, ahead=True, programs_per_sm=2)
MANY_ROWS = Configuration(block_rows=128, block_slots=64, warps=8, stages=2, ahead=True, programs_per_sm=1)
MANY_ROWS_FP8 = Configuration(block_rows=128, block_slots=64, warps=8, stages=3, ahead=True, programs_per_sm=1)

# (rows of a group at most, configuration), first match
TABLE: tuple[tuple[int, Configuration], ...] = ((16, FEW_ROWS), (64, SOME_ROWS), (1 << 30, MANY_ROWS))
TABLE_FP8: tuple[tuple[int, Configuration], ...] = ((16, FEW_ROWS), (64, SOME_ROWS), (1 << 30, MANY_ROWS_FP8))


def choose(rows: int, fp8: bool) -> Configuration:
    """The configuration for so many rows (beams x heads of a group) of each request and group."""
    return next(configuration for most, configuration in (TABLE_FP8 if fp8 else TABLE) if rows <= most)


FEW_ROWS_CANDIDATES = tuple(
    Configuration(16, block_slots, 4, stages, False, programs_per_sm)
    for block_slots in (64, 128)
    for stages in (2, 3)
    for programs_per_sm in (1, 2, 3)
)
CANDIDATES = tuple(
    Configuration(block_rows, block_slots, block_rows // 16, stages, ahead, programs_per_sm)
    for block_rows, block_slots, stages, ahead, split in (
        (128, 64, 2, True, 1),
        (128, 64, 3, True, 1),
        (128, 128, 2, True, 1),
        (128, 128, 2, False, 1),
        (128, 128, 3, False, 1),
        (128, 64, 3, False, 1),
        (64, 64, 2, True, 2),
        (64, 128, 2, False, 2),
        (64, 128, 3, False, 2),
        (64, 64, 3, False, 2),
    )
    for programs_per_sm in (0, split)
) + (Configuration(64, 64, 4, 3, False, 3, registers=168),)
"""For many rows. A warpgroup holds 64 rows; the split schedule has as many programs as fit a multiprocessor."""
