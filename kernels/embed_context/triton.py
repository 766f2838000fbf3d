"""Some context rows a program: gather the embeddings of an item's codes, add them up, quantize if asked to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.tilings import RowTiling, row_tiling
from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, allocate_scales, store_quantized_rows
from .reference import embed_static

__all__ = ["embed_context", "embed_context_quantize", "embed_static"]
MAX_LEVELS = 5


@triton.jit
def _embedding(table_ptr, index, live, column, WIDTH: tl.constexpr):
    """Float32 [rows, blocks, 128] of a table, zeros where not live."""
    at = index.to(tl.int64)[:, None, None] * WIDTH + column[None, :, :]
    mask = live[:, None, None] & (column < WIDTH)[None, :, :]
    return tl.load(table_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["items", "ages", "short_term_length", "scale_block_stride"])
def embed_context_kernel(
    history_ptr,
    lengths_ptr,
    table_0_ptr,
    table_1_ptr,
    table_2_ptr,
    table_3_ptr,
    table_4_ptr,
    static_ptr,
    recency_ptr,
    segment_ptr,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    items,
    ages,  # rows of the recency table
    short_term_length,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    ROWS: tl.constexpr,  # of a program
    RECENCY: tl.constexpr,
    SEGMENT: tl.constexpr,
    SCALES: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    item = slot - 1
    length = tl.load(lengths_ptr + request)
    live = (item >= 0) & (item < tl.minimum(length, items))
    column = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    codes_ptr = history_ptr + (request * items + item) * LEVELS
    # The order of the sum is the model's.
    total = _embedding(table_0_ptr, tl.load(codes_ptr, mask=live, other=0), live, column, WIDTH)
    total += _embedding(table_1_ptr, tl.load(codes_ptr + 1, mask=live, other=0), live, column, WIDTH)
    if LEVELS > 2:
        total += _embedding(table_2_ptr, tl.load(codes_ptr + 2, mask=live, other=0), live, column, WIDTH)
    if LEVELS > 3:
        total += _embedding(table_3_ptr, tl.load(codes_ptr + 3, mask=live, other=0), live, column, WIDTH)
    if LEVELS > 4:
        total += _embedding(table_4_ptr, tl.load(codes_ptr + 4, mask=live, other=0), live, column, WIDTH)
    age = length - 1 - item
    if RECENCY:
        age = tl.minimum(age, ages - 1)
        total += _embedding(recency_ptr, age, live, column, WIDTH)
    if SEGMENT:
        total += _embedding(segment_ptr, (age < short_term_length).to(tl.int32), live, column, WIDTH)
    first = slot == 0
    total += _embedding(static_ptr, tl.zeros([ROWS], tl.int64) + request, first, column, WIDTH)
    row = request * (items + 1) + slot
    store_quantized_rows(
        total.to(tl.bfloat16),
        row,
        slot <= items,
        out_ptr,
        scale_ptr,
        scale_row_stride,
        scale_block_stride,
        WIDTH,
        SCALES,
    )


def embed_context(
    history: Tensor,
    lengths: Tensor,
    tables: Sequence[Tensor],
    static: Tensor,
    recency: Tensor | None,
    segment: Tensor | None,
    short_term_length: int,
    tiling: RowTiling | None = None,
) -> Tensor:
    """As `reference.embed_context`: bfloat16 [batch * (1 + items), width]; contiguous tensors of 2 to 5 levels.

    Codes of items within a length must be rows of their tables: they are not checked.

    Raises:
        ValueError: names a tensor of another type, shape or layout.
    """
    arguments = (history, lengths, tables, static, recency, segment, short_term_length)
    return _launch(*arguments, scales=NO_SCALES, tiling=tiling)[0]


def embed_context_quantize(
    history: Tensor,
    lengths: Tensor,
    tables: Sequence[Tensor],
    static: Tensor,
    recency: Tensor | None,
    segment: Tensor | None,
    short_term_length: int,
    block_scales: bool,
    tiling: RowTiling | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.embed_context_quantize`; block scales are column-major, see `allocate_scales`.

    Raises:
        ValueError: as `embed_context`.
    """
    arguments = (history, lengths, tables, static, recency, segment, short_term_length)
    return _launch(*arguments, scales=BLOCK_SCALES if block_scales else ROW_SCALES, tiling=tiling)


def _launch(
    history: Tensor,
    lengths: Tensor,
    tables: Sequence[Tensor],
    static: Tensor,
    recency: Tensor | None,
    segment: Tensor | None,
    short_term_length: int,
    scales: int,
    tiling: RowTiling | None,
) -> tuple[Tensor, Tensor]:
    _check(history, lengths, tables, static, recency, segment)
    batch, items, levels = history.shape
    rows, width = batch * (items + 1), static.shape[1]
    out = static.new_empty(rows, width, dtype=torch.float8_e4m3fn if scales else torch.bfloat16)
    scale = allocate_scales(rows, width, scales, static.device)
    tiling = tiling or row_tiling(rows, width)
    if batch:
        embed_context_kernel[(triton.cdiv(items + 1, tiling.rows), batch)](
            history,
            lengths,
            *tables,
            *[None] * (MAX_LEVELS - levels),
            static,
            recency,
            segment,
            out,
            scale,
            scale.stride(0),
            scale.stride(1) if scales == BLOCK_SCALES else 0,
            items,
            0 if recency is None else len(recency),
            short_term_length,
            LEVELS=levels,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            ROWS=tiling.rows,
            RECENCY=recency is not None,
            SEGMENT=segment is not None,
            SCALES=scales,
            num_warps=tiling.warps,
        )
    return out, scale


def _check(
    history: Tensor,
    lengths: Tensor,
    tables: Sequence[Tensor],
    static: Tensor,
    recency: Tensor | None,
    segment: Tensor | None,
) -> None:
    levels = len(tables)
    if history.ndim != 3 or history.dtype != torch.int32 or not history.is_contiguous() or history.shape[2] != levels:
        raise ValueError(
            f"history: expected contiguous int32 [batch, items, {levels}], got {history.dtype} {list(history.shape)}"
        )
    if not 2 <= levels <= MAX_LEVELS:
        raise ValueError(f"tables: expected 2 to {MAX_LEVELS}, got {levels}")
    if lengths.dtype != torch.int32 or lengths.shape != history.shape[:1]:
        raise ValueError(f"lengths: expected int32 [{len(history)}], got {lengths.dtype} {list(lengths.shape)}")
    if static.ndim != 2 or len(static) != len(history):
        raise ValueError(f"static: expected [{len(history)}, width], got {list(static.shape)}")
    named = [(f"tables[{level}]", table) for level, table in enumerate(tables)]
    optional = [(name, tensor) for name, tensor in (("recency", recency), ("segment", segment)) if tensor is not None]
    for name, tensor in [("static", static), *named, *optional]:
        if tensor.dtype != torch.bfloat16 or tensor.shape[1:] != static.shape[1:] or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous bfloat16 [rows, {static.shape[1]}], "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    if segment is not None and len(segment) != 2:
        raise ValueError(f"segment: expected 2 rows, got {len(segment)}")
