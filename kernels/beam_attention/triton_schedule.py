"""The schedule of attention work over programs that take equal shares, and the merge of the tiles that it splits.

Work is counted in blocks: one tile of rows (beams x heads of a group) against one block of slots. The blocks of all
tiles stand in one line: by request, group, tile, block. Programs take consecutive shares of equal length of it,
whatever the lengths and beam counts are, so a tile may begin in one program and end in another; each leaves its part
of the softmax in a workspace and `merge_kernel` joins the parts, always in the order of their slots.

Requests are walked with scalar loads: what derives from them stays in uniform registers, where matrix descriptors and
copies need it. (Reductions over a tensor of requests cost 100 instructions more in each turn of the attention loop.)
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_request(
    lengths_ptr,
    counts_ptr,
    request,
    GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Of a request: slots, live rows of a group, blocks of a tile, units of a tile and of all its tiles.

    The unit of a schedule that splits tiles is a block, otherwise a tile.
    """
    length = tl.load(lengths_ptr + request)
    rows = tl.load(counts_ptr + request) * HEADS_PER_GROUP
    blocks = tl.cdiv(length, BLOCK_N)
    units = blocks if SPLIT else tl.minimum(blocks, 1)
    return length, rows, blocks, units, units * tl.cdiv(rows, BLOCK_M) * GROUPS


@triton.jit
def share_of_program(
    lengths_ptr,
    counts_ptr,
    batch,
    GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """(first position, end, units of a share) of this program in the line."""
    total = 0
    for request in tl.range(0, batch, num_stages=1):
        _, _, _, _, units = load_request(
            lengths_ptr, counts_ptr, request, GROUPS, HEADS_PER_GROUP, BLOCK_M, BLOCK_N, SPLIT
        )
        total += units
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), MIN_BLOCKS) if SPLIT else 1
    position = tl.program_id(0) * share
    return position, tl.minimum(position + share, total), share


@triton.jit
def group_offset(request, group, beams, GROUPS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where a group's heads of a request's first beam start in [batch, beams, heads, head_dim]."""
    return (tl.cast(request, tl.int64) * beams * GROUPS + group) * (HEADS_PER_GROUP * HEAD_DIM)


@triton.jit
def row_offsets(row, GROUPS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where rows start, counted from `group_offset`; row = beam * heads of a group + head of the group."""
    return (row // HEADS_PER_GROUP * (GROUPS * HEADS_PER_GROUP) + row % HEADS_PER_GROUP) * HEAD_DIM


@triton.jit
def merge_parts(
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    program,
    end,
    local,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """(weighted values, row sum) of rows `local` of the tile that `program` began and program end - 1 ended."""
    column = tl.arange(0, WIDTH)
    row_max = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([MERGE_ROWS], tl.float32)
    total = tl.zeros([MERGE_ROWS, WIDTH], tl.float32)
    for other in range(program, end):
        part = (2 * other + (other == program).to(tl.int32)) * BLOCK_M + local
        part_max = tl.load(part_max_ptr + part)
        new_max = tl.maximum(row_max, part_max)
        rescale = tl.exp2(row_max - new_max)
        part_rescale = tl.exp2(part_max - new_max)
        row_sum = row_sum * rescale + tl.load(part_sum_ptr + part) * part_rescale
        values = tl.load(part_ptr + part.to(tl.int64)[:, None] * WIDTH + column[None, :])
        total = total * rescale[:, None] + values * part_rescale[:, None]
        row_max = new_max
    return total, row_sum


@triton.jit
def merge_kernel(
    value_scale_ptr,
    lengths_ptr,
    counts_ptr,
    out_ptr,
    part_ptr,  # [programs, 2, BLOCK_M, WIDTH]: of a tile that an earlier program began, of one that a later one ends
    part_max_ptr,  # [programs, 2, BLOCK_M]
    part_sum_ptr,
    batch,
    beams,
    GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    FP8: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """Program (p, i) joins rows i * MERGE_ROWS.. of the tile that program p of the main kernel began, not ended."""
    program = tl.program_id(0)
    start, end, share = share_of_program(
        lengths_ptr, counts_ptr, batch, GROUPS, HEADS_PER_GROUP, BLOCK_M, BLOCK_N, True, MIN_BLOCKS
    )
    local = tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    column = tl.arange(0, WIDTH)
    request_start = 0
    for request in tl.range(0, batch, num_stages=1):
        _, rows, blocks, _, units = load_request(
            lengths_ptr, counts_ptr, request, GROUPS, HEADS_PER_GROUP, BLOCK_M, BLOCK_N, True
        )
        if (start < end) & (end > request_start) & (end <= request_start + units):
            tile = (end - 1 - request_start) // blocks
            tile_start = request_start + tile * blocks
            tiles = tl.cdiv(rows, BLOCK_M)
            row = tile % tiles * BLOCK_M + local
            alive = tile % tiles * BLOCK_M + tl.program_id(1) * MERGE_ROWS < rows
            if alive & (tile_start >= start) & (tile_start + blocks > end):
                last = (tile_start + blocks - 1) // share
                total, row_sum = merge_parts(
                    part_ptr, part_max_ptr, part_sum_ptr, program, last + 1, local, BLOCK_M, WIDTH, MERGE_ROWS
                )
                group = tile // tiles
                factor = 1.0 / row_sum
                if FP8:
                    factor *= tl.load(value_scale_ptr + request * GROUPS + group)
                out = out_ptr + group_offset(request, group, beams, GROUPS, HEADS_PER_GROUP, HEAD_DIM)
                at = row_offsets(row, GROUPS, HEADS_PER_GROUP, HEAD_DIM)[:, None] + column[None, :]
                inside = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
                tl.store(out + at, (total * factor[:, None]).to(tl.bfloat16), mask=inside)
        request_start += units
