"""Attention of one tile of rows over some blocks of its request's slots: the loop where the time goes.

Running maxima are rounded up to whole exponents of 2, so that rescaling is exact and a probability rounds alike against
an early maximum and against the last (E4M3's very smallest aside): where a softmax is cut into blocks or shared out
between programs, float32 sums are taken in another order, no more.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_rows(rows):
    """E4M3 codes of each row and the largest magnitude that code 448 stands for."""
    values = rows.to(tl.float32)
    # Bits of magnitudes order as the magnitudes do, with NaN on top: a poisoned row must stay visible.
    top = tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    amax = tl.maximum(top, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.clamp(values * tl.div_rn(448.0, amax)[:, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return codes.to(tl.float8e4nv), amax


@triton.jit
def add_block(
    total,
    row_max,
    row_sum,
    scores,
    scale,  # [BLOCK_M], from scores to exponents of 2
    key,
    values,
    request,
    group,
    start,
    length,
    REUSE: tl.constexpr,  # the block of keys serves as values
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One block of slots into (weighted values, row maximum, row sum)."""
    if start + BLOCK_N > length:
        scores = tl.where((start + tl.arange(0, BLOCK_N) < length)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.ceil(tl.max(scores, axis=1) * scale))
    rescale = tl.exp2(row_max - new_max)
    if FP8:
        # At most 2**8, in reach of E4M3's 448; the row sum carries the same factor, so it cancels.
        probability = tl.exp2(scores * scale[:, None] - (new_max - 8.0)[:, None])
        # The accumulator of the first product holds its columns in another order than an 8-bit operand of the second
        # needs. Values are stored in that order, so this renames columns and moves nothing between threads.
        codes = probability.to(tl.float8e4nv).reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2)
        codes = codes.permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)
        value = values.load([request, group, 0, start]).reshape(WIDTH, BLOCK_N)
        # Tensor cores add FP8 products in fewer than 24 bits, so the running total is kept outside of them.
        total = total * rescale[:, None] + tl.dot(codes, value.T, max_num_imprecise_acc=BLOCK_N)
    else:
        probability = tl.exp2(scores * scale[:, None] - new_max[:, None])
        value = key if REUSE else values.load([request, group, start, 0]).reshape(BLOCK_N, WIDTH)
        total = tl.dot(probability.to(tl.bfloat16), value, total * rescale[:, None])
    return total, new_max, row_sum * rescale + tl.sum(probability, axis=1)


@triton.jit
def attend(
    query,
    scale,
    keys,
    values,
    request,
    group,
    first,
    last,
    length,
    SHARED_VALUES: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks first..last of one tile: (weighted values, row maximum, row sum), scaled by 2**-maximum."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    REUSE: tl.constexpr = SHARED_VALUES and not FP8
    for block in tl.range(first, last, num_stages=STAGES):
        key = keys.load([request, group, block * BLOCK_N, 0]).reshape(BLOCK_N, WIDTH)
        total, row_max, row_sum = add_block(
            total,
            row_max,
            row_sum,
            tl.dot(query, key.T),
            scale,
            key,
            values,
            request,
            group,
            block * BLOCK_N,
            length,
            REUSE,
            FP8,
            BLOCK_M,
            BLOCK_N,
            WIDTH,
        )
    return total, row_max, row_sum
