"""Times every configuration of short rows, and the long rows, on scores of several kinds; each result is checked first.

python -m loka_serve.kernels.radix_topk.sweep prints a JSON line for each; `cuda.SHORT_ROWS` rests on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from ..benchmarking import copies_beyond_l2, time_us
from .bench import beam_scores
from .cuda import SHORT_ROWS, Configuration, radix_topk
from .reference import radix_topk as reference

# A row of 8192 columns, cut in several ways.
CANDIDATES = (
    Configuration(threads=256, items=32, capacity=1024, blocks_per_sm=4),
    Configuration(threads=256, items=32, capacity=1024, blocks_per_sm=4, group=8),
    Configuration(threads=256, items=32, capacity=1024, blocks_per_sm=4, log2_bins=10),
    Configuration(threads=256, items=32, capacity=1024, blocks_per_sm=4, log2_bins=10, group=8),
    Configuration(threads=256, items=32, capacity=1024, blocks_per_sm=3, resident=True),
    Configuration(threads=256, items=32, capacity=1024, blocks_per_sm=3, group=8, resident=True),
    Configuration(threads=512, items=16, capacity=1024, blocks_per_sm=3),
    Configuration(threads=512, items=16, capacity=1024, blocks_per_sm=3, group=8),
    Configuration(threads=512, items=16, capacity=1024, blocks_per_sm=3, log2_bins=10),
    Configuration(threads=512, items=16, capacity=1024, blocks_per_sm=2, resident=True),
    Configuration(threads=1024, items=8, capacity=1024, blocks_per_sm=2),
)


def rounded_scores(rows: int, columns: int, seed: int) -> Tensor:
    """Scores with many equals, as of bfloat16 logits."""
    return beam_scores(rows, columns, seed).bfloat16().float()


def sparse_scores(finite: int) -> Callable[[int, int, int], Tensor]:
    """Scores of which about so many of a row are finite, as a constrained beam search makes them."""

    def scores(rows: int, columns: int, seed: int) -> Tensor:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        allowed = torch.rand(rows, columns, device="cuda", generator=generator) < finite / columns
        return torch.where(allowed, beam_scores(rows, columns, seed), float("-inf"))

    return scores


Scores = Callable[[int, int, int], Tensor]
SHORT: tuple[tuple[str, Scores, int, int, int], ...] = (
    ("beams", beam_scores, 16384, 8192, 512),
    ("beams", beam_scores, 512, 8192, 512),
    ("beams", beam_scores, 32, 8192, 512),
    ("beams", beam_scores, 16384, 8192, 128),
    ("bfloat16", rounded_scores, 16384, 8192, 512),
    ("300 finite", sparse_scores(300), 16384, 8192, 512),
    ("2000 finite", sparse_scores(2000), 16384, 8192, 512),
)
LONG: tuple[tuple[str, Scores, int, int, int], ...] = (
    ("beams", beam_scores, 32, 512 * 8192, 512),
    ("beams", beam_scores, 32, 512 * 8192, 128),
    ("beams", beam_scores, 1, 512 * 8192, 512),
    ("beams", beam_scores, 32, 600_000, 512),
    ("bfloat16", rounded_scores, 32, 512 * 8192, 512),
    ("200 finite", sparse_scores(200), 32, 512 * 8192, 512),
    ("500 finite", sparse_scores(500), 32, 512 * 8192, 512),
    ("2000 finite", sparse_scores(2000), 32, 512 * 8192, 512),
    ("20000 finite", sparse_scores(20000), 32, 512 * 8192, 512),
)


def exact(scores: Tensor, k: int, found: tuple[Tensor, Tensor]) -> bool:
    """Whether a result is the reference's."""
    values, indices = reference(scores, k)
    return torch.equal(found[0], values) and torch.equal(found[1].long(), indices)


def measure(
    kind: str, make: Scores, rows: int, columns: int, k: int, candidates: tuple[Configuration | None, ...]
) -> None:
    """Print a JSON line for each candidate; None lets radix_topk choose."""
    inputs = [(make(rows, columns, seed),) for seed in range(copies_beyond_l2(rows * columns * 4, at_most=8))]
    torch_us = time_us(lambda scores: torch.topk(scores, k, dim=1), inputs, repeats=5)
    for candidate in candidates:

        def call(scores: Tensor, candidate: Configuration | None = candidate) -> tuple[Tensor, Tensor]:
            return radix_topk(scores, k, configuration=candidate)

        is_exact = all(exact(scores, k, call(scores)) for (scores,) in inputs[:2])
        us = time_us(call, inputs)
        record = {
            "shape": f"[{rows}, {columns}] k={k}",
            "scores": kind,
            "configuration": str(candidate) if candidate else "default",
            "us": round(us, 2),
            "torch_us": round(torch_us, 1),
            "ratio": round(torch_us / us, 2),
            "exact": is_exact,
            "chosen": candidate is None or candidate in SHORT_ROWS,
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    for case in LONG:
        measure(*case, candidates=(None,))
    for case in SHORT:
        measure(*case, candidates=CANDIDATES)
