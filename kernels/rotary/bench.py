"""Rotary encoding in one pass, against the reference under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..benchmarking import KernelRow, compiled, copies_beyond_l2, make_row, relative_error, time_us
from . import reference
from .triton import rotate_keys, rotate_queries

HEADS, HEAD_DIM, THETA = 11, 128, 10000.0  # onerec-v2-4b-a0.5b
BEAMS = ((1, 1), (8, 1), (1, 64), (1, 512), (8, 512), (32, 512))
SLOTS = ((1, 512), (1, 3001), (8, 3001), (32, 3001))


def rows() -> Iterator[KernelRow]:
    """Queries at each (batch, beams), keys at each (batch, slots)."""
    baselines = compiled(reference.rotate_queries), compiled(reference.rotate_keys)
    for batch, beams in BEAMS:
        size = batch * beams * HEADS * HEAD_DIM * 2
        inputs = [
            (
                torch.randn(batch, beams, HEADS, HEAD_DIM, device="cuda").bfloat16(),
                torch.randint(0, 3000, (batch,), device="cuda").int(),
                THETA,
            )
            for _ in range(copies_beyond_l2(size))
        ]
        error = relative_error(rotate_queries(*inputs[0]), reference.rotate_queries(*inputs[0]))
        us, baseline = time_us(rotate_queries, inputs), ("torch.compile", time_us(baselines[0], inputs))
        yield make_row("rotate_queries", f"B{batch} W{beams}", us, 0, 2 * size, baseline, error)
    for batch, slots in SLOTS:
        size = batch * slots * HEADS * HEAD_DIM * 2
        keys = [
            (torch.randn(batch, slots, HEADS, HEAD_DIM, device="cuda").bfloat16(), THETA)
            for _ in range(copies_beyond_l2(size))
        ]
        error = relative_error(rotate_keys(*keys[0]), reference.rotate_keys(*keys[0]))
        us, baseline = time_us(rotate_keys, keys), ("torch.compile", time_us(baselines[1], keys))
        yield make_row("rotate_keys", f"B{batch} {slots} slots", us, 0, 2 * size, baseline, error)
