"""Training batches: every training event after a user's first is a target, its earlier events are the history.

All events lie on the device as tensors; a batch is a few gathers there, nothing is copied while training runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from examples.beauty.sequences import Sequences
from examples.groceries.batches import Batch


def history_batch(codes: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves items out: codes [B, T, L] with kept bool [B, T] -> the kept ones first, in order, and how many [B]."""
    order = torch.argsort((~kept).long(), dim=1, stable=True)
    return codes.gather(1, order[..., None].expand_as(codes)), kept.sum(1)


class PrefixSource:
    """Draws epochs of batches; everything random follows from (seed, epoch).

    Args:
        context: longest history, newest items; histories are padded to it, so that all batches have one shape.
        rows: targets a batch; an epoch leaves out what does not fill the last one.
        history_dropout: probability of each history item to be left out.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        context: int,
        rows: int,
        history_dropout: float,
        device: torch.device,
        seed: int,
    ) -> None:
        self.context, self.history_dropout, self.device, self.seed = context, history_dropout, device, seed
        first = np.repeat(sequences.offsets[:-1], np.diff(sequences.offsets))
        targets = np.flatnonzero(sequences.training_rows() & (np.arange(len(sequences.items)) > first))
        self.targets = torch.from_numpy(targets).to(device)
        self.earlier = torch.from_numpy(targets - first[targets]).to(device)
        self.codes = torch.from_numpy(sequences.semantic_ids[sequences.items].astype(np.int64)).to(device)
        self.rows = min(rows, len(targets))

    def epoch(self, epoch: int) -> Iterator[tuple[float, Batch]]:
        """Batches of one epoch, each with the fraction of the epoch done before it."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 100_003 + epoch)
        order = torch.randperm(len(self.targets), generator=generator, device=self.device)
        count = len(order) // self.rows
        for index in range(count):
            yield index / count, self._batch(order[index * self.rows : (index + 1) * self.rows], generator)

    def _batch(self, chosen: Tensor, generator: torch.Generator) -> Batch:
        targets = self.targets[chosen]
        lengths = self.earlier[chosen].clamp_max(self.context)
        positions = torch.arange(self.context, device=self.device)
        real = positions < lengths[:, None]
        rows = torch.where(real, (targets - lengths)[:, None] + positions, targets[:, None] - 1)
        kept = torch.rand(rows.shape, generator=generator, device=self.device) >= self.history_dropout
        history, lengths = history_batch(self.codes[rows], real & kept)
        return Batch(
            history=history,
            lengths=lengths,
            features=torch.zeros(len(chosen), 0, dtype=torch.long, device=self.device),
            targets=self.codes[targets][:, None],
            cutoffs=lengths[:, None],
            weights=torch.ones(len(chosen), 1, device=self.device),
        )
