"""What no program of a GEMM does to rows sorted by expert: gathering, SwiGLU, the groups that libraries take.

All leave padding alone, and blocks that are not needed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..quantize.triton import store_quantized_rows


@triton.jit
def _token_of(row, row_token_ptr, expert_of_block_ptr, BLOCK_M: tl.constexpr):
    """The token of each sorted row, -1 in padding."""
    needed = tl.load(expert_of_block_ptr + row // BLOCK_M) >= 0
    return tl.load(row_token_ptr + row, mask=needed, other=-1)


@triton.jit(do_not_specialize=["scale_block_stride", "out_scale_block_stride"])
def gather_kernel(
    x_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    row_token_ptr,
    expert_of_block_ptr,
    out_ptr,
    out_scale_ptr,
    out_scale_row_stride,
    out_scale_block_stride,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = _token_of(row, row_token_ptr, expert_of_block_ptr, BLOCK_M)
    valid = token >= 0
    row, source = row.to(tl.int64), token.to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = valid[:, None, None] & (column < WIDTH)[None, :, :]
    values = tl.load(x_ptr + source[:, None, None] * WIDTH + column[None, :, :], mask=inside)
    tl.store(out_ptr + row[:, None, None] * WIDTH + column[None, :, :], values, mask=inside)
    if SCALES == 2:
        inside = valid[:, None] & (block * 128 < WIDTH)[None, :]
        at = source[:, None] * scale_row_stride + (block * scale_block_stride)[None, :]
        scale = tl.load(scale_ptr + at, mask=inside)
        at = row[:, None] * out_scale_row_stride + (block * out_scale_block_stride)[None, :]
        tl.store(out_scale_ptr + at, scale, mask=inside)
    elif SCALES == 1:
        scale = tl.load(scale_ptr + source * scale_row_stride, mask=valid)
        tl.store(out_scale_ptr + row * out_scale_row_stride, scale, mask=valid)


@triton.jit(do_not_specialize=["scale_block_stride"])
def sorted_swiglu_kernel(
    gate_up_ptr,
    row_token_ptr,
    expert_of_block_ptr,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = _token_of(row, row_token_ptr, expert_of_block_ptr, BLOCK_M) >= 0
    row = row.to(tl.int64)
    column = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = valid[:, None, None] & (column < WIDTH)[None, :, :]
    gate_at = row[:, None, None] * (2 * WIDTH) + column[None, :, :]
    gate = tl.load(gate_up_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    activated = gate * tl.sigmoid(gate) * up
    if SCALES == 0:
        activated = activated.to(tl.bfloat16)
    store_quantized_rows(activated, row, valid, out_ptr, scale_ptr, scale_row_stride, scale_block_stride, WIDTH, SCALES)


@triton.jit(do_not_specialize=["blocks"])
def group_ends_kernel(row_token_ptr, expert_of_block_ptr, end_ptr, blocks, BLOCK_M: tl.constexpr, STEP: tl.constexpr):
    expert = tl.program_id(0)
    end = 0
    owned = 0
    for start in range(0, blocks, STEP):
        block = start + tl.arange(0, STEP)
        owner = tl.load(expert_of_block_ptr + block, mask=block < blocks, other=-1)
        end += tl.sum(((owner >= 0) & (owner <= expert)).to(tl.int32))
        owned += tl.sum((owner == expert).to(tl.int32))
    last = tl.maximum(end - 1, 0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.load(row_token_ptr + last, mask=owned + last * 0 > 0, other=0)
    tl.store(end_ptr + expert, end * BLOCK_M - tl.sum((tokens < 0).to(tl.int32)))


@triton.jit
def row_experts_kernel(row_token_ptr, expert_of_block_ptr, row_expert_ptr, BLOCK_M: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(expert_of_block_ptr + tl.program_id(0))
    token = tl.load(row_token_ptr + row, mask=expert + row * 0 >= 0, other=-1)
    tl.store(row_expert_ptr + row, tl.where(token >= 0, expert, -1))
