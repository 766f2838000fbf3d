"""Memory at fixed addresses, which graphs read and write: inputs, outputs, the catalog's trie; and their host ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loka_serve.catalog.trie import Trie
from loka_serve.engines.base import BeamResult, EngineRequest
from loka_serve.engines.hopper.buckets import Bucket
from loka_serve.kernels.level_head.reference import (
    AllowedNodes,
    TrieLevel,
    align_capacity,
    compact_capacity,
    pack_allowed,
)

WORD_BITS = 32


@dataclass(frozen=True)
class Inputs:
    """One batch, padded to a bucket.

    Attributes:
        history: int32 [B, T, L]. lengths: int32 [B]; -1 where the bucket has no request.
        features: int32 [B, F]. beam_widths: int32 [B]; 0 where the bucket has no request.
        filtered: int32 [B], 1 where the request has a filter.
    """

    history: Tensor
    lengths: Tensor
    features: Tensor
    beam_widths: Tensor
    filtered: Tensor

    @staticmethod
    def numbers(bucket: Bucket, levels: int, features: int) -> int:
        return bucket.batch * (bucket.context * levels + features + 3)

    @classmethod
    def view(cls, flat: Tensor, bucket: Bucket, levels: int, features: int) -> Inputs:
        """The parts of one flat int32 buffer, so that a batch crosses to the device in one copy."""
        batch = bucket.batch
        sizes = [batch * bucket.context * levels, batch, batch * features, batch, batch]
        history, lengths, feature, widths, filtered = flat[: sum(sizes)].split(sizes)
        return cls(
            history.view(batch, bucket.context, levels), lengths, feature.view(batch, features), widths, filtered
        )

    def fill(self, requests: Sequence[EngineRequest]) -> None:
        """Write a batch; for a view of host memory."""
        history, lengths, features, widths, filtered = (
            part.numpy() for part in (self.history, self.lengths, self.features, self.beam_widths, self.filtered)
        )
        lengths[:], widths[:], filtered[:], features[:] = -1, 0, 0, 0
        for row, request in enumerate(requests):
            items = len(request.history)
            history[row, :items] = request.history
            history[row, items:] = 0
            lengths[row], features[row], widths[row] = items, request.features, request.beam_width
            filtered[row] = request.filter is not None
        history[len(requests) :] = 0


@dataclass(frozen=True)
class Outputs:
    """Ranked leaves of a batch: nodes int32 [B, W], scores float32 [B, W], counts and failed int32 [B]."""

    nodes: Tensor
    scores: Tensor
    counts: Tensor
    failed: Tensor

    @classmethod
    def allocate(cls, batch: int, beam: int, device: torch.device | str, pinned: bool = False) -> Outputs:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        return cls(empty(batch * beam), empty(batch * beam, dtype=torch.float32), empty(batch), empty(batch))

    def view(self, bucket: Bucket) -> Outputs:
        shape = (bucket.batch, bucket.beam)
        nodes, scores = (part[: bucket.batch * bucket.beam].view(shape) for part in (self.nodes, self.scores))
        return Outputs(nodes, scores, self.counts[: bucket.batch], self.failed[: bucket.batch])

    def copy_from(self, other: Outputs) -> None:
        for target, source in zip(self._parts(), other._parts(), strict=True):
            target.copy_(source, non_blocking=True)

    def to_result(self, requests: int, timings: dict[str, float]) -> BeamResult:
        """Copies of the first `requests` rows; for a view of host memory."""
        nodes, scores, counts, failed = (part[:requests].numpy().copy() for part in self._parts())
        return BeamResult(nodes, scores, counts, failed.astype(np.bool_), timings)

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self._parts())

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.nodes, self.scores, self.counts, self.failed


@dataclass(frozen=True)
class CatalogRoom:
    """How large a catalog the buffers, and the graphs that use them, hold.

    Attributes:
        nodes: of each level.
        capacities: columns of the compact table of candidates, by level and beams before it, of which level 0 has one;
            none where the table is dense.
        beams: beams a request, for each of which there are graphs.
    """

    nodes: tuple[int, ...]
    capacities: Mapping[tuple[int, int], int]
    beams: tuple[int, ...]

    @classmethod
    def of(
        cls, tries: Sequence[Trie], headroom: float, beams: tuple[int, ...], codebook_sizes: tuple[int, ...]
    ) -> CatalogRoom:
        """Room for each of these tries.

        Args:
            headroom: nodes, and candidates of a request, that fit, as a multiple of the largest trie's.
            codebook_sizes: the model's, which the logits have.
        """
        needed = [_columns(trie, beams) for trie in tries]
        capacities: dict[tuple[int, int], int] = {}
        for level, wide in needed[0]:
            capacity = align_capacity(int(max(columns[level, wide] for columns in needed) * headroom))
            # Otherwise the dense table is hardly larger, and has no prefix to wait for.
            if capacity <= wide * codebook_sizes[level] // 2:
                capacities[level, wide] = capacity
        most = [max(counts) for counts in zip(*(trie.node_counts for trie in tries), strict=True)]
        return cls(tuple(int(count * headroom) + WORD_BITS for count in most), capacities, beams)

    def capacity(self, level: int, beams: int) -> int | None:
        """Columns of the compact table of a level's candidates, in a graph of that many beams; None: a dense table."""
        return self.capacities.get((level, beams if level else 1))

    def fits(self, trie: Trie) -> bool:
        """Whether the buffers take it, and every graph holds the candidates that its requests may have."""
        if any(count > room for count, room in zip(trie.node_counts, self.nodes, strict=True)):
            return False
        # A dense table holds any.
        return all(columns <= self.capacities.get(key, columns) for key, columns in _columns(trie, self.beams).items())

    def bytes(self, batch: int) -> int:
        """Of the device's memory, for buffers of that many requests."""
        trie = sum(parents + 1 + nodes for parents, nodes in zip((1, *self.nodes), self.nodes, strict=False))
        return 4 * (trie + batch * sum(self.words))

    @property
    def words(self) -> list[int]:
        """int32 words of a request's filter, by level."""
        return [-(-nodes // WORD_BITS) for nodes in self.nodes]


def _columns(trie: Trie, beams: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """What a compact table needs, by level and beams before it."""
    columns = {(0, 1): align_capacity(trie.node_counts[0])}
    most = max(beams)
    for level, offsets in enumerate(trie.child_offsets, start=1):
        counts = np.diff(offsets)
        if most < len(counts):  # once, since a catalog has millions
            counts = np.partition(counts, -most)[-most:]
        columns |= {(level, wide): compact_capacity(counts, wide) for wide in beams}
    return columns


class CatalogBuffers:
    """A trie on the device, with room for a larger one in the same place, and the filters of a batch in it.

    Attributes:
        levels: the trie.
        filters: int32 [batch, words] by level, bits of the nodes that each request may reach; `staged` for each slot
            on the host.
    """

    def __init__(self, trie: Trie, room: CatalogRoom, batch: int, device: torch.device, slots: int) -> None:
        self.room = room
        self.levels = tuple(
            TrieLevel(
                torch.zeros(parents + 1, dtype=torch.int32, device=device),
                torch.zeros(nodes, dtype=torch.int32, device=device),
            )
            for parents, nodes in zip((1, *room.nodes), room.nodes, strict=False)
        )
        self.filters = [torch.zeros(batch, words, dtype=torch.int32, device=device) for words in room.words]
        pinned = device.type == "cuda"
        self.staged = [
            [torch.zeros(batch, words, dtype=torch.int32, pin_memory=pinned) for words in room.words]
            for _ in range(slots)
        ]
        self.load(trie)

    def load(self, trie: Trie) -> None:
        """Put a trie that fits in the place of the last; ordered after the work that the current stream has."""
        offsets = [np.array([0, trie.node_counts[0]]), *trie.child_offsets]
        # All of them before the first copy: where the host's memory is short, the last trie is still whole.
        pairs = zip(offsets, trie.tokens, strict=True)
        sources = [torch.from_numpy(array.astype(np.int32)) for pair in pairs for array in pair]
        targets = [part for level in self.levels for part in (level.first_child, level.codes)]
        for target, source in zip(targets, sources, strict=True):
            target[: len(source)].copy_(source)

    @property
    def bytes(self) -> int:
        """Of the device's memory."""
        trie = sum(level.first_child.nbytes + level.codes.nbytes for level in self.levels)
        return trie + sum(bits.nbytes for bits in self.filters)

    def allowed(self, level: int, inputs: Inputs) -> AllowedNodes:
        return AllowedNodes(self.filters[level][: len(inputs.filtered)], inputs.filtered)

    def send(self, requests: Sequence[EngineRequest], slot: int) -> None:
        """Enqueue the copies of the filters that a batch has."""
        for row, request in enumerate(requests):
            if request.filter is None:
                continue
            for level, nodes in enumerate(request.filter.allowed_nodes):
                words: NDArray[np.int32] = pack_allowed(nodes)
                staged = self.staged[slot][level][row, : len(words)]
                staged.numpy()[:] = words
                self.filters[level][row, : len(words)].copy_(staged, non_blocking=True)
