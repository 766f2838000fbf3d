"""Histories and tables for the tests of the context's embedding."""

from __future__ import annotations

import torch
from torch import Tensor

Arguments = tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor | None, Tensor | None, int]


def make_arguments(
    lengths: list[int],
    items: int,
    levels: int,
    width: int,
    device: str,
    recency: bool = True,
    short_term_length: int = 0,
    codes: int = 7,
) -> Arguments:
    """Arguments of `embed_context`; codes beyond a length are far out of bounds."""
    generator = torch.Generator().manual_seed(items * width + levels)
    batch = len(lengths)
    length = torch.tensor(lengths, dtype=torch.int32)
    history = torch.randint(0, codes, (batch, items, levels), generator=generator).int()
    history[torch.arange(items) >= length[:, None]] = 2**30

    def table(rows: int) -> Tensor:
        return torch.randn(rows, width, generator=generator).bfloat16().to(device)

    return (
        history.to(device),
        length.to(device),
        [table(codes) for _ in range(levels)],
        table(batch),
        table(max([*lengths, 1])) if recency else None,
        table(2) if short_term_length else None,
        short_term_length,
    )
