"""Rotary position encoding in place or into another tensor: one pass over queries or context keys."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # pairs of one program


@triton.jit(do_not_specialize=["places"])
def rotate_kernel(
    x_ptr,
    out_ptr,
    positions_ptr,
    frequencies_ptr,
    places,
    x_batch_stride,
    x_place_stride,
    x_head_stride,
    out_batch_stride,
    out_place_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # of head_dim
    HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr,  # heads of places
    KEYS: tl.constexpr,  # a position a place, from the place before; otherwise one a request
):
    request = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = row // HEADS
    head = row % HEADS
    pair = tl.arange(0, HALF_PADDED)
    inside = (place < places)[:, None] & (pair < HALF)[None, :]
    from_row = request * x_batch_stride + place.to(tl.int64) * x_place_stride + head * x_head_stride
    to_row = request * out_batch_stride + place.to(tl.int64) * out_place_stride + head * out_head_stride
    x = x_ptr + from_row[:, None] + pair[None, :]
    out = out_ptr + to_row[:, None] + pair[None, :]
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < HALF, other=0.0)
    # The static slot is not turned: at position 0 all angles are 0.
    position = tl.maximum(place - 1, 0)
    if not KEYS:
        position = tl.zeros_like(place) + tl.load(positions_ptr + request)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    tl.store(out, (first * cos - second * sin).to(tl.bfloat16), mask=inside)
    tl.store(out + HALF, (second * cos + first * sin).to(tl.bfloat16), mask=inside)


@functools.cache
def rotary_frequencies(half: int, theta: float, device: torch.device) -> Tensor:
    """Float32 [half], computed as `loka_serve.models.layers.rotate` does, once a device.

    Raises:
        RuntimeError: the first call with these arguments is within a graph capture; call it before.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("rotary_frequencies: call once before the capture, so that the table outlives the graph")
    frequencies = theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams will read it; only at the first call
    return frequencies


def rotate_queries(query: Tensor, positions: Tensor, theta: float, out: Tensor | None = None) -> Tensor:
    """As `reference.rotate_queries`.

    Args:
        query: bfloat16 [batch, beams, heads, head_dim], head_dim contiguous and even, other strides free.
        positions: int32 [batch].
        theta: base of the frequencies.
        out: bfloat16 of query's shape, which may be the query itself; allocated by default.

    Raises:
        ValueError: names a tensor of another type, shape or layout.
        RuntimeError: see `rotary_frequencies`.
    """
    if positions.dtype != torch.int32 or positions.shape != query.shape[:1] or not positions.is_contiguous():
        raise ValueError(f"positions: expected int32 [{len(query)}], got {positions.dtype} {list(positions.shape)}")
    return _launch("query", query, positions, theta, out)


def rotate_keys(keys: Tensor, theta: float, out: Tensor | None = None) -> Tensor:
    """As `reference.rotate_keys`.

    Args:
        keys: bfloat16 [batch, slots, groups, head_dim], head_dim contiguous and even, other strides free.
        theta: base of the frequencies.
        out: bfloat16 of keys' shape, which may be the keys themselves where they do not serve as values; allocated by
            default.

    Raises:
        ValueError, RuntimeError: as `rotate_queries`.
    """
    return _launch("keys", keys, None, theta, out)


def _launch(name: str, x: Tensor, positions: Tensor | None, theta: float, out: Tensor | None) -> Tensor:
    if x.ndim != 4 or x.dtype != torch.bfloat16 or x.stride(3) != 1 or x.shape[3] % 2:
        raise ValueError(f"{name}: expected bfloat16 [batch, places, heads, even], got {x.dtype} {list(x.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if out.shape != x.shape or out.dtype != x.dtype or out.stride(3) != 1:
        raise ValueError(f"out: expected bfloat16 {list(x.shape)}, got {out.dtype} {list(out.shape)}")
    batch, places, heads, head_dim = x.shape
    half = head_dim // 2
    padded = triton.next_power_of_2(half)
    rows = max(ELEMENTS // padded, 1)
    if x.numel():
        rotate_kernel[(triton.cdiv(places * heads, rows), batch)](
            x,
            out,
            positions,
            rotary_frequencies(half, theta, x.device),
            places,
            *x.stride()[:3],
            *out.stride()[:3],
            HEADS=heads,
            HALF=half,
            HALF_PADDED=padded,
            ROWS=rows,
            KEYS=positions is None,
            num_warps=4,
        )
    return out
