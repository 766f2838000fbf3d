"""Embedding of contexts in one pass, against the reference under torch.compile; a sweep of row tilings.

python -m loka_serve.kernels.embed_context.bench prints the sweep.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..benchmarking import (
    D_MODEL,
    KernelRow,
    compiled,
    copies_beyond_l2,
    dequantized,
    make_row,
    print_sweep,
    relative_error,
    scale_bytes,
    time_us,
)
from . import reference
from .triton import embed_context, embed_context_quantize

LEVELS, CODES, MAX_CONTEXT = 3, 8192, 3000  # onerec-v2-4b-a0.5b
# (requests, items): rows are requests * (1 + items).
SHAPES = ((1, 0), (1, 7), (1, 63), (1, 511), (8, 511), (32, 511), (8, 3000), (32, 3000))
Inputs = list[tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor, None, int]]


def rows() -> Iterator[KernelRow]:
    """BF16 rows, and E4M3 with block scales, of full histories at each shape."""
    tables, recency = make_tables()
    baselines = (compiled(reference.embed_context), compiled(reference.embed_context_quantize))
    for batch, items in SHAPES:
        inputs = make_inputs(batch, items, tables, recency)
        row_count, beside = batch * (1 + items), "torch.compile"
        shape, reads = f"B{batch} {items} items", _bytes_read(inputs)
        found, expected = embed_context(*inputs[0]), reference.embed_context(*inputs[0])
        us, baseline = time_us(embed_context, inputs), (beside, time_us(baselines[0], inputs))
        error = relative_error(found, expected)
        yield make_row("embed_context", f"{shape}, BF16", us, 0, reads + row_count * D_MODEL * 2, baseline, error)

        quantized = [(*arguments, True) for arguments in inputs]
        codes, expected_codes = embed_context_quantize(*quantized[0]), reference.embed_context_quantize(*quantized[0])
        error = relative_error(dequantized(*codes), dequantized(*expected_codes))
        us, baseline = time_us(embed_context_quantize, quantized), (beside, time_us(baselines[1], quantized))
        traffic = reads + row_count * D_MODEL + scale_bytes(row_count, D_MODEL, True)
        yield make_row("embed_context", f"{shape}, E4M3, block scales", us, 0, traffic, baseline, error)


def make_tables() -> tuple[list[Tensor], Tensor]:
    """Item embeddings of every level, and recency embeddings."""
    tables = [torch.randn(CODES, D_MODEL, device="cuda").bfloat16() for _ in range(LEVELS)]
    return tables, torch.randn(MAX_CONTEXT, D_MODEL, device="cuda").bfloat16()


def make_inputs(batch: int, items: int, tables: list[Tensor], recency: Tensor) -> Inputs:
    """Sets of histories of uniform codes; the tables are larger than the L2 cache by themselves."""
    inputs: Inputs = []
    for seed in range(copies_beyond_l2(batch * (1 + items) * D_MODEL * 2)):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        history = torch.randint(0, CODES, (batch, items, LEVELS), device="cuda", generator=generator).int()
        lengths = torch.full((batch,), items, dtype=torch.int32, device="cuda")
        static = torch.randn(batch, D_MODEL, device="cuda", generator=generator).bfloat16()
        inputs.append((history, lengths, tables, static, recency, None, 0))
    return inputs


def _bytes_read(inputs: Inputs) -> int:
    """Codes, and every row of a table that is needed, once."""
    history, _, _, static, *_ = inputs[0]
    distinct = sum(len(history[..., level].unique()) for level in range(LEVELS))
    return 4 * history.numel() + 2 * D_MODEL * (distinct + len(static) + history.shape[1])


def sweep() -> None:
    """Print the time of every row tiling, as JSON lines."""
    tables, recency = make_tables()
    for batch, items in ((1, 511), (1, 3000), (32, 3000)):
        inputs = make_inputs(batch, items, tables, recency)
        count = batch * (1 + items)
        traffic = _bytes_read(inputs) + count * D_MODEL * 2
        print_sweep("embed_context", f"B{batch} {items} items", count, D_MODEL, traffic, embed_context, inputs)


if __name__ == "__main__":
    sweep()
