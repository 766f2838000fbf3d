"""One program a beam: store its key and value, attend to them and to its ancestors', quantize if asked to."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, allocate_scales, store_quantized


@triton.jit
def self_attention_kernel(
    qkv_ptr,
    key_cache_ptr,  # [levels, batch, most beams, heads, head_dim], both caches alike
    value_cache_ptr,
    ancestors_ptr,
    counts_ptr,
    out_ptr,
    out_scale_ptr,
    scale_row_stride,
    scale_block_stride,
    cache_level_stride,
    cache_request_stride,
    ancestor_request_stride,
    ancestor_beam_stride,
    beams,
    scale,
    LEVEL: tl.constexpr,
    STORE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # power of two, at least HEADS
    SCALES: tl.constexpr,
):
    request = tl.program_id(1)
    beam = tl.program_id(0)
    if beam < tl.load(counts_ptr + request):
        head = tl.arange(0, HEADS_PADDED)
        at = head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        inside = (head < HEADS)[:, None]
        row = request.to(tl.int64) * beams + beam
        qkv = qkv_ptr + row * (3 * HEADS * HEAD_DIM) + at
        query = tl.load(qkv, mask=inside, other=0.0).to(tl.float32) * scale
        key = tl.load(qkv + HEADS * HEAD_DIM, mask=inside, other=0.0)
        value = tl.load(qkv + 2 * HEADS * HEAD_DIM, mask=inside, other=0.0)
        cache = request.to(tl.int64) * cache_request_stride
        if STORE:
            place = cache + LEVEL * cache_level_stride + beam * (HEADS * HEAD_DIM) + at
            tl.store(key_cache_ptr + place, key, mask=inside)
            tl.store(value_cache_ptr + place, value, mask=inside)
        row_max = tl.sum(query * key.to(tl.float32), axis=1)
        row_sum = tl.full([HEADS_PADDED], 1.0, tl.float32)
        total = value.to(tl.float32)
        for past in tl.static_range(LEVEL):
            ancestor = tl.load(ancestors_ptr + request * ancestor_request_stride + beam * ancestor_beam_stride + past)
            place = cache + past * cache_level_stride + ancestor * (HEADS * HEAD_DIM) + at
            key = tl.load(key_cache_ptr + place, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(value_cache_ptr + place, mask=inside, other=0.0).to(tl.float32)
            score = tl.sum(query * key, axis=1)
            new_max = tl.maximum(row_max, score)
            rescale = tl.exp2(row_max - new_max)
            probability = tl.exp2(score - new_max)
            total = total * rescale[:, None] + value * probability[:, None]
            row_sum = row_sum * rescale + probability
            row_max = new_max
        attended = (total * (1.0 / row_sum)[:, None]).to(tl.bfloat16)
        store_quantized(
            attended,
            row * (HEADS * HEAD_DIM) + at,
            inside,
            head,
            row,
            out_ptr,
            out_scale_ptr,
            scale_row_stride,
            scale_block_stride,
            HEADS * HEAD_DIM,
            SCALES,
        )


def self_attention(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    ancestors: Tensor | None,
    beam_counts: Tensor,
    level: int,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.self_attention`, but rows of dead beams stay as they are in `out` (zero without one).

    qkv and the caches contiguous; the last dimension of ancestors contiguous.
    """
    batch, beams, _, heads, head_dim = qkv.shape
    out = qkv.new_zeros(batch, beams, heads, head_dim) if out is None else out
    if out.shape != (batch, beams, heads, head_dim) or out.dtype != qkv.dtype or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous bfloat16 {[batch, beams, heads, head_dim]}")
    none = allocate_scales(batch * beams, heads * head_dim, NO_SCALES, qkv.device)
    _launch(qkv, key_cache, value_cache, ancestors, beam_counts, level, scale, out, none, NO_SCALES)
    return out


def self_attention_quantize(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    ancestors: Tensor | None,
    beam_counts: Tensor,
    level: int,
    block_scales: bool,
    scale: float | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(E4M3 codes [batch * beams, heads * head_dim], scales) of `self_attention` rounded to bfloat16.

    Scales are [rows], or by 1 x 128 block as `allocate_scales` lays them out (head_dim 128 only). With `out` nothing is
    cleared: codes and scales of dead beams stay as they are in `out` and `out_scale` (undefined without the latter).
    Without `out` both are zero.

    Args:
        out: contiguous E4M3 [batch * beams, heads * head_dim], written in place.
        out_scale: as `allocate_scales` shapes it, written in place; only beside `out`.
    """
    batch, beams, _, heads, head_dim = qkv.shape
    if block_scales and head_dim != 128:
        raise ValueError(f"block_scales: expected head_dim 128, got {head_dim}")
    scales = BLOCK_SCALES if block_scales else ROW_SCALES
    rows, width = batch * beams, heads * head_dim
    if out is None:
        if out_scale is not None:
            raise ValueError("out_scale: expected beside out")
        out = torch.zeros(rows, width, dtype=torch.float8_e4m3fn, device=qkv.device)
        out_scale = allocate_scales(rows, width, scales, qkv.device).zero_()
    elif out_scale is None:
        out_scale = allocate_scales(rows, width, scales, qkv.device)
    if out.shape != (rows, width) or out.dtype != torch.float8_e4m3fn or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous E4M3 {[rows, width]}, got {out.dtype} {list(out.shape)}")
    shape = [rows, heads] if block_scales else [rows]
    if list(out_scale.shape) != shape or out_scale.dtype != torch.float32:
        raise ValueError(f"out_scale: expected float32 {shape}, got {out_scale.dtype} {list(out_scale.shape)}")
    _launch(qkv, key_cache, value_cache, ancestors, beam_counts, level, scale, out, out_scale, scales)
    return out, out_scale


def _launch(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    ancestors: Tensor | None,
    beam_counts: Tensor,
    level: int,
    scale: float | None,
    out: Tensor,
    out_scale: Tensor,
    scales: int,
) -> None:
    _check(qkv, key_cache, value_cache, ancestors, beam_counts, level)
    batch, beams, _, heads, head_dim = qkv.shape
    if batch and beams:
        self_attention_kernel[(beams, batch)](
            qkv,
            key_cache,
            value_cache,
            ancestors,
            beam_counts,
            out,
            out_scale,
            out_scale.stride(0),
            out_scale.stride(1) if scales == BLOCK_SCALES else 0,
            key_cache.stride(0),
            key_cache.stride(1),
            0 if ancestors is None else ancestors.stride(0),
            0 if ancestors is None else ancestors.stride(1),
            beams,
            # Scores are exponents of 2.
            (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            LEVEL=level,
            STORE=level < key_cache.shape[0],
            HEADS=heads,
            HEAD_DIM=head_dim,
            HEADS_PADDED=triton.next_power_of_2(heads),
            SCALES=scales,
            num_warps=4,
        )


def _check(
    qkv: Tensor, key_cache: Tensor, value_cache: Tensor, ancestors: Tensor | None, beam_counts: Tensor, level: int
) -> None:
    batch, beams, three, heads, head_dim = qkv.shape
    if qkv.dtype != torch.bfloat16 or not qkv.is_contiguous() or three != 3 or head_dim & (head_dim - 1):
        raise ValueError(
            "qkv: expected contiguous bfloat16 [batch, beams, 3, heads, a power of two], "
            f"got {qkv.dtype} {list(qkv.shape)}"
        )
    levels, most_beams = key_cache.shape[0], key_cache.shape[2]
    if levels < level or most_beams < beams:
        raise ValueError(f"key_cache: expected at least {level} levels of {beams} beams, got {list(key_cache.shape)}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape != (levels, batch, most_beams, heads, head_dim) or not cache.is_contiguous():
            raise ValueError(f"{name}: expected contiguous {[levels, batch, most_beams, heads, head_dim]}")
        if cache.dtype != torch.bfloat16:
            raise ValueError(f"{name}: expected bfloat16, got {cache.dtype}")
    if level and (
        ancestors is None
        or ancestors.dtype != torch.int32
        or ancestors.shape[:2] != (batch, beams)
        or ancestors.shape[2] < level
        or ancestors.stride(2) != 1
    ):
        raise ValueError(f"ancestors: expected int32 {[batch, beams, level]}")
    if beam_counts.dtype != torch.int32 or beam_counts.shape != (batch,):
        raise ValueError(f"beam_counts: expected int32 [{batch}]")


@triton.jit
def extend_ancestors_kernel(
    previous_ptr,
    parents_ptr,
    out_ptr,
    previous_beams,
    beams,
    total,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < total
    parent = tl.load(parents_ptr + row, mask=inside, other=0)
    # Dead beams may name any parent.
    parent = tl.minimum(tl.maximum(parent, 0), previous_beams - 1)
    for past in tl.static_range(LEVEL):
        place = tl.load(previous_ptr + (row // beams * previous_beams + parent) * LEVEL + past, mask=inside, other=0)
        tl.store(out_ptr + row * (LEVEL + 1) + past, place, mask=inside)
    tl.store(out_ptr + row * (LEVEL + 1) + LEVEL, parent, mask=inside)


def extend_ancestors(previous: Tensor | None, parents: Tensor, out: Tensor | None = None) -> Tensor:
    """As `reference.extend_ancestors`; contiguous tensors. Parents are clamped to the beams of the level before."""
    batch, beams = parents.shape
    before, level = (1, 0) if previous is None else previous.shape[1:]
    for name, tensor in (("previous", previous), ("parents", parents)):
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise ValueError(f"{name}: expected contiguous int32, got {tensor.dtype} with strides {tensor.stride()}")
    if previous is not None and previous.shape[0] != batch:
        raise ValueError(f"previous: expected [{batch}, beams, level], got {list(previous.shape)}")
    out = parents.new_empty(batch, beams, level + 1) if out is None else out
    if out.shape != (batch, beams, level + 1) or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous int32 {[batch, beams, level + 1]}")
    total = batch * beams
    if total:
        extend_ancestors_kernel[(triton.cdiv(total, 256),)](
            previous, parents, out, before, beams, total, LEVEL=level, BLOCK=256
        )
    return out
