"""A bounded, uniform random sample of the rows that reach a site: the real inputs that recipes are measured on."""

from __future__ import annotations

import torch
from torch import Tensor


class RowSample:
    """At most `capacity` rows of a stream, each row equally likely to be among them.

    Every row draws a random key and the smallest keys stay, which needs no knowledge of the stream's length.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(0)
        self._rows: Tensor | None = None

    def update(self, rows: Tensor) -> None:
        """Offer rows ``[M, K]``."""
        keys = torch.rand(rows.shape[0], generator=self._generator)
        if len(self._keys) == self.capacity:  # full: most rows of a long stream end here, uncopied
            candidates = (keys < self._keys.max()).nonzero().flatten()
            keys, rows = keys[candidates], rows[candidates.to(rows.device)]
        if not len(keys):
            return
        rows = rows.detach().float().cpu()
        merged_keys = torch.cat([self._keys, keys])
        merged_rows = rows if self._rows is None else torch.cat([self._rows, rows])
        kept = merged_keys.argsort(stable=True)[: self.capacity]
        self._keys, self._rows = merged_keys[kept], merged_rows[kept]

    def rows(self, width: int) -> Tensor:
        """The sampled rows, float32 ``[at most capacity, width]``."""
        return torch.empty(0, width) if self._rows is None else self._rows


class GroupRowSample:
    """A `RowSample` for each group of a grouped site."""

    def __init__(self, groups: int, capacity_per_group: int, seed: int) -> None:
        self._samples = [RowSample(capacity_per_group, seed + group) for group in range(groups)]

    def update(self, rows: Tensor, group_offsets: Tensor) -> None:
        """Offer rows ``[M, K]`` sorted by group; offsets int64 ``[groups + 1]``."""
        bounds = group_offsets.tolist()
        for sample, start, end in zip(self._samples, bounds[:-1], bounds[1:], strict=True):
            if end > start:
                sample.update(rows[start:end])

    def rows(self, width: int) -> tuple[Tensor, Tensor]:
        """The sampled rows sorted by group, float32 ``[M, width]``, and their group offsets, int64 ``[groups + 1]``."""
        parts = [sample.rows(width) for sample in self._samples]
        counts = torch.tensor([0] + [len(part) for part in parts])
        return torch.cat(parts), counts.cumsum(0)
