"""Memory at fixed addresses, which graphs read and write: inputs, outputs, the catalog's trie; and their host ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loka_serve.catalog.trie import Trie
from loka_serve.engines.base import BeamResult, EngineLimits, EngineRequest
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


class TrieBuffers:
    """The trie on the device, with room for a larger one in the same place.

    Args:
        headroom: nodes, and candidates of a request, that fit, as a multiple of the first trie's.
        beams: beams a request, for each of which there are graphs.
        codebook_sizes: the model's, which the logits have.
    """

    def __init__(
        self,
        trie: Trie,
        headroom: float,
        device: torch.device,
        beams: tuple[int, ...],
        codebook_sizes: tuple[int, ...],
    ) -> None:
        self.beams = beams
        self.capacities: dict[tuple[int, int], int] = {}
        for (level, wide), columns in self._columns(trie).items():
            capacity = align_capacity(int(columns * headroom))
            # Otherwise the dense table is hardly larger, and has no prefix to wait for.
            if capacity <= wide * codebook_sizes[level] // 2:
                self.capacities[level, wide] = capacity
        room = [int(count * headroom) + WORD_BITS for count in trie.node_counts]
        self.levels = tuple(
            TrieLevel(
                torch.zeros((1 if level == 0 else room[level - 1]) + 1, dtype=torch.int32, device=device),
                torch.zeros(nodes, dtype=torch.int32, device=device),
            )
            for level, nodes in enumerate(room)
        )
        self.load(trie)

    @property
    def bytes(self) -> int:
        return sum(level.first_child.nbytes + level.codes.nbytes for level in self.levels)

    def capacity(self, level: int, beams: int) -> int | None:
        """Columns of the compact table of a level's candidates, in a graph of that many beams; None: a dense table."""
        return self.capacities.get((level, beams if level else 1))

    def _columns(self, trie: Trie) -> dict[tuple[int, int], int]:
        """What a compact table needs, by level and beams before it, of which level 0 has one."""
        columns = {(0, 1): align_capacity(trie.node_counts[0])}
        most = max(self.beams)
        for level, offsets in enumerate(trie.child_offsets, start=1):
            counts = np.diff(offsets)
            if most < len(counts):  # once, since a catalog has millions
                counts = np.partition(counts, -most)[-most:]
            columns |= {(level, beams): compact_capacity(counts, beams) for beams in self.beams}
        return columns

    def fits(self, trie: Trie) -> bool:
        """Whether `load` takes it, and every graph holds the candidates that its requests may have."""
        if any(count > len(level.codes) for count, level in zip(trie.node_counts, self.levels, strict=True)):
            return False
        # A dense table holds any.
        return all(columns <= self.capacities.get(key, columns) for key, columns in self._columns(trie).items())

    def load(self, trie: Trie) -> None:
        """Put a trie that fits in the place of the last; ordered after the work that the current stream has."""
        offsets = [np.array([0, trie.node_counts[0]]), *trie.child_offsets]
        for level, first_child, codes in zip(self.levels, offsets, trie.tokens, strict=True):
            for target, source in ((level.first_child, first_child), (level.codes, codes)):
                target[: len(source)].copy_(torch.from_numpy(source.astype(np.int32)))


class FilterBuffers:
    """Bits of the nodes that each request of a batch may reach, on the device and twice on the host."""

    def __init__(self, trie: TrieBuffers, limits: EngineLimits, device: torch.device, slots: int) -> None:
        words = [-(-len(level.codes) // WORD_BITS) for level in trie.levels]
        self.device = [torch.zeros(limits.batch, count, dtype=torch.int32, device=device) for count in words]
        pinned = device.type == "cuda"
        self.host = [
            [torch.zeros(limits.batch, count, dtype=torch.int32, pin_memory=pinned) for count in words]
            for _ in range(slots)
        ]

    @property
    def bytes(self) -> int:
        return sum(bits.nbytes for bits in self.device)

    def allowed(self, level: int, inputs: Inputs) -> AllowedNodes:
        return AllowedNodes(self.device[level][: len(inputs.filtered)], inputs.filtered)

    def send(self, requests: Sequence[EngineRequest], slot: int) -> None:
        """Enqueue the copies of the filters that a batch has."""
        for row, request in enumerate(requests):
            if request.filter is None:
                continue
            for level, nodes in enumerate(request.filter.allowed_nodes):
                words: NDArray[np.int32] = pack_allowed(nodes)
                staged = self.host[slot][level][row, : len(words)]
                staged.numpy()[:] = words
                self.device[level][row, : len(words)].copy_(staged, non_blocking=True)
