"""Grouped GEMM over rows sorted by expert, with gathered inputs and SwiGLU and requantization in its epilogue.

A program computes BLOCK_M rows times one or two tiles of 128 weight rows: with SwiGLU the matching tiles of gate and
up, otherwise neighbours; or times one tile of 256. fp8_block sums each 128-wide slice of K on the tensor cores and adds
it, scaled, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weight_scale(pointer, row, LANES: tl.constexpr, ROWS: tl.constexpr, K_BLOCKS: tl.constexpr, ALIGNED: tl.constexpr):
    """The scale of some weight rows in one slice of K: a number, or [1, LANES] where the rows straddle two tiles."""
    if ALIGNED:
        return tl.load(pointer + tl.minimum(row, ROWS - 1) // 128 * K_BLOCKS)
    else:
        rows = tl.minimum(row + tl.arange(0, LANES), ROWS - 1)
        return tl.load(pointer + rows // 128 * K_BLOCKS)[None, :]


@triton.jit
def _accumulate(total, x, w, x_scale, w_scale, SCALES: tl.constexpr):
    if SCALES == 2:
        return total + tl.dot(x, w.T) * (x_scale * w_scale)
    elif SCALES == 1:
        # Hopper's tensor cores keep too few bits of a long FP8 sum; this adds each slice of K in float32.
        return tl.dot(x, w.T, total, max_num_imprecise_acc=x.shape[1])
    else:
        return tl.dot(x, w.T, total)


@triton.jit
def _place(tile, blocks, TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Which block of rows and which tile of columns: groups of blocks go over the columns together."""
    first = tile // (GROUP_M * TILES) * GROUP_M
    group = tl.minimum(blocks - first, GROUP_M)
    within = tile % (GROUP_M * TILES)
    return first + within % group, within // group


@triton.jit
def _weight_tile(
    weight,
    base,
    row,
    k,
    LANES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Rows of one expert's weight, which starts `base` rows into the whole; those beyond its last are never used."""
    if DESCRIBED:
        return weight.load([base + row, k])
    else:
        k_lane = tl.arange(0, BLOCK_K)
        rows = tl.minimum(row + tl.arange(0, LANES), N - 1)
        pointers = weight + base.to(tl.int64) * K + rows[:, None] * K + k_lane[None, :] + k
        if K % BLOCK_K == 0:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(k_lane < K - k)[None, :], other=0.0)


@triton.jit(do_not_specialize=["x_scale_block_stride", "out_scale_block_stride", "rows", "blocks", "programs"])
def grouped_linear_kernel(
    x,  # pointer, or where X_DESCRIBED a descriptor of boxes [BLOCK_M, BLOCK_K]
    x_scale_ptr,
    x_scale_row_stride,
    x_scale_block_stride,
    weight,  # pointer, or where W_DESCRIBED a descriptor [experts * N, K] of boxes [LANES, BLOCK_K]
    weight_scale_ptr,
    row_token_ptr,
    expert_of_block_ptr,
    block_count_ptr,
    out_ptr,
    out_scale_ptr,
    out_scale_row_stride,
    out_scale_block_stride,
    rows,
    blocks,  # at most so many
    programs,
    N: tl.constexpr,  # rows of one expert's weight
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # 128 with block scales
    GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr,  # a program computes every programs-th tile
    GROUPED: tl.constexpr,  # False: one expert, rows in place
    GATHER: tl.constexpr,  # x is by token, not by sorted row
    SWIGLU: tl.constexpr,
    PAIRED: tl.constexpr,
    LANES: tl.constexpr,  # columns of one product: 128, or 256 with neither SWIGLU nor PAIRED
    X_DESCRIBED: tl.constexpr,  # without GATHER; block scales or none
    W_DESCRIBED: tl.constexpr,
    SCALES: tl.constexpr,  # of x and weight; 0: bfloat16, 1: a scale a row, 2: a scale a block
    OUT_SCALES: tl.constexpr,  # 0: bfloat16, 2: a scale a 1 x 128 block
):
    WIDTH: tl.constexpr = N // 2 if SWIGLU else N
    TILE: tl.constexpr = 256 if PAIRED else LANES
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    TWO: tl.constexpr = SWIGLU or PAIRED
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    ALIGNED: tl.constexpr = PAIRED or WIDTH % 128 == 0  # whether the second tile lies within one tile of scales

    program = tl.program_id(0)
    if PERSISTENT:
        if GROUPED:
            blocks = tl.load(block_count_ptr)
        end = blocks * TILES
    elif GROUPED:  # none or one
        block, _ = _place(program, blocks, TILES, GROUP_M)
        end = program + (tl.load(expert_of_block_ptr + block) >= 0).to(tl.int32)
    else:
        end = program + 1
    # Flattened, the loads of a program's next tile start before it has finished with the last.
    for tile in tl.range(program, end, programs, flatten=PERSISTENT):
        block, column = _place(tile, blocks, TILES, GROUP_M)
        column *= TILE
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        if GROUPED:
            expert = tl.load(expert_of_block_ptr + block)
            token = tl.load(row_token_ptr + row)
        else:
            expert = tl.zeros([], tl.int32)
            token = tl.where(row < rows, row, -1)
        valid = token >= 0
        source = (token if GATHER else row).to(tl.int64)

        lane = tl.arange(0, LANES)
        k_lane = tl.arange(0, BLOCK_K)
        base = expert * N
        first = column
        second = column + (WIDTH if SWIGLU else 128)
        if not X_DESCRIBED:
            x_ptrs = x + source[:, None] * K + k_lane[None, :]
        if SCALES == 2:
            x_scale_ptrs = x_scale_ptr + source * x_scale_row_stride
            tile_scale_ptr = weight_scale_ptr + expert.to(tl.int64) * ((N + 127) // 128 * K_BLOCKS)

        first_sum = tl.zeros([BLOCK_M, LANES], tl.float32)
        second_sum = tl.zeros([BLOCK_M, LANES], tl.float32)
        for k in range(0, K, BLOCK_K):
            if SCALES == 2:  # asked for before the product starts, so that they arrive while it runs
                x_scale = tl.load(x_scale_ptrs + k // 128 * x_scale_block_stride, mask=valid, other=0.0)[:, None]
                first_scale = _weight_scale(tile_scale_ptr + k // 128, first, LANES, N, K_BLOCKS, LANES == 128)
                if TWO:
                    second_scale = _weight_scale(tile_scale_ptr + k // 128, second, LANES, N, K_BLOCKS, ALIGNED)
            else:
                x_scale, first_scale, second_scale = None, None, None
            if X_DESCRIBED:
                x_tile = x.load([block * BLOCK_M, k])
            elif K % BLOCK_K == 0:
                x_tile = tl.load(x_ptrs + k, mask=valid[:, None], other=0.0)
            else:
                x_tile = tl.load(x_ptrs + k, mask=valid[:, None] & (k_lane < K - k)[None, :], other=0.0)
            w = _weight_tile(weight, base, first, k, LANES, N, K, BLOCK_K, W_DESCRIBED)
            first_sum = _accumulate(first_sum, x_tile, w, x_scale, first_scale, SCALES)
            if TWO:
                w = _weight_tile(weight, base, second, k, LANES, N, K, BLOCK_K, W_DESCRIBED)
                second_sum = _accumulate(second_sum, x_tile, w, x_scale, second_scale, SCALES)

        if SCALES == 1:
            row_scale = tl.load(x_scale_ptr + source * x_scale_row_stride, mask=valid, other=0.0)[:, None]
            channel_ptr = weight_scale_ptr + expert.to(tl.int64) * N
            first_sum *= row_scale * tl.load(channel_ptr + tl.minimum(first + lane, N - 1))[None, :]
            if TWO:
                second_sum *= row_scale * tl.load(channel_ptr + tl.minimum(second + lane, N - 1))[None, :]

        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * WIDTH + (column + lane)[None, :]
        in_width = (column + lane < WIDTH)[None, :]
        inside = valid[:, None] & in_width
        if SWIGLU:
            # 1 / (1 + e) as a squared reciprocal root: half the instructions of a division, 2**-21 accurate.
            root = tl.math.rsqrt(1.0 + tl.math.exp2(first_sum * -1.4426950408889634))
            first_sum = first_sum * root * root * second_sum
        if OUT_SCALES == 2:
            amax = tl.max(tl.where(in_width, tl.abs(first_sum), 0.0), axis=1)
            amax = tl.maximum(amax, 1e-12, propagate_nan=tl.PropagateNan.ALL)
            codes = (first_sum * (448.0 / amax)[:, None]).to(tl.float8e4nv)
            tl.store(out_ptrs, codes, mask=inside)
            scale_at = row.to(tl.int64) * out_scale_row_stride + column // 128 * out_scale_block_stride
            tl.store(out_scale_ptr + scale_at, amax / 448.0, mask=valid)
        else:
            tl.store(out_ptrs, first_sum.to(tl.bfloat16), mask=inside)
            if PAIRED:
                inside = valid[:, None] & (column + 128 + lane < WIDTH)[None, :]
                tl.store(out_ptrs + 128, second_sum.to(tl.bfloat16), mask=inside)
