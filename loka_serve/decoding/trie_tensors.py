"""The catalog's trie as tensors on the engine's device, and the masks of a batch's filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loka_serve.catalog.filters import CatalogFilter
from loka_serve.catalog.trie import Trie


@dataclass(frozen=True)
class TrieTensors:
    """Int64 copies of a trie's CSR arrays.

    Attributes:
        codes: per level, [nodes], the code of each node.
        first_child: per level but the last, [nodes + 1]; children of node n are first_child[n] to first_child[n + 1].
    """

    codes: tuple[Tensor, ...]
    first_child: tuple[Tensor, ...]

    @classmethod
    def from_trie(cls, trie: Trie, device: torch.device | str) -> TrieTensors:
        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        return cls(tuple(map(to_device, trie.tokens)), tuple(map(to_device, trie.child_offsets)))

    @property
    def levels(self) -> int:
        return len(self.codes)


def stack_filters(
    filters: Sequence[CatalogFilter | None], node_counts: Sequence[int], device: torch.device | str
) -> list[Tensor] | None:
    """Bool [batch, nodes] for each level, True where a request may go; None when no request has a filter."""
    if all(request_filter is None for request_filter in filters):
        return None
    masks = []
    for level, nodes in enumerate(node_counts):
        everything = np.ones(nodes, dtype=np.bool_)
        rows = [everything if entry is None else entry.allowed_nodes[level] for entry in filters]
        masks.append(torch.from_numpy(np.stack(rows)).to(device))
    return masks
