"""Exact, sorted top-k against torch.topk and, where it is installed, FlashInfer; sweep.py has the configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..benchmarking import KernelRow, copies_beyond_l2, make_row, time_us
from .cuda import radix_topk
from .reference import radix_topk as reference

SHAPES = ((32, 512 * 8192), (16384, 8192), (1, 512 * 8192), (512, 8192))
K = 512


def beam_scores(rows: int, columns: int, seed: int) -> Tensor:
    """Scores as a beam step makes them: 8192-wide rows of log-probabilities, each above its parent's score."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.randn(rows, columns, device="cuda", generator=generator).mul_(2.0)
    parents = torch.randn(rows, -(-columns // 8192), device="cuda", generator=generator).sort(1, descending=True).values
    for start in range(0, columns, 8192):
        logits[:, start : start + 8192] += parents[:, start // 8192, None] - 9.0
    return logits


def baselines() -> Iterator[tuple[str, Callable[[Tensor], object]]]:
    """Libraries at hand, by name."""
    yield "torch.topk", lambda scores: torch.topk(scores, K, dim=1)
    try:
        import flashinfer
    except ImportError:
        return
    yield "flashinfer.top_k sorted", lambda scores: flashinfer.top_k(scores, K, sorted=True)


def rows() -> Iterator[KernelRow]:
    """One row for each shape and library."""
    for row_count, columns in SHAPES:
        copies = copies_beyond_l2(row_count * columns * 4, at_most=8)
        inputs = [(beam_scores(row_count, columns, seed),) for seed in range(copies)]
        values, indices = radix_topk(inputs[0][0], K)
        expected_values, expected_indices = reference(inputs[0][0], K)
        assert torch.equal(values, expected_values) and torch.equal(indices.long(), expected_indices)
        us = time_us(lambda scores: radix_topk(scores, K), inputs)
        traffic = row_count * (columns * 4 + K * 8)
        for name, call in baselines():
            shape = f"[{row_count}, {columns}] k={K}"
            yield make_row("radix_topk", shape, us, 0, traffic, (name, time_us(call, inputs, repeats=7)), 0.0)
