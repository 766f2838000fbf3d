"""Buckets: the padded sizes that the engine is warmed up for. A batch's own sizes decide which one it runs in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.errors import EngineError

LEAST_BEAM, LEAST_CONTEXT = 128, 512


@dataclass(frozen=True, order=True)
class Bucket:
    """Requests, beams a request and history items a request that a graph has room for."""

    batch: int
    beam: int
    context: int


@dataclass(frozen=True)
class Buckets:
    """The grid of buckets: every combination of the sizes, each ascending to the engine's limit."""

    batches: tuple[int, ...]
    beams: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def of(cls, limits: EngineLimits, options: HopperOptions) -> Buckets:
        """The options' sizes, or a grid of our own, up to the limits, which are always there.

        Beams are powers of two and contexts of four. Batches are closer, as padding costs as much as requests do: at
        four fifths of the most load, in batches of 5 to 10, powers of two alone would waste a quarter of the work.

        Raises:
            EngineError: a size beyond the limits.
        """
        return cls(
            _sizes("batches", options.batches or _batches(limits.batch), limits.batch),
            _sizes("beams", options.beams or _doubling(LEAST_BEAM, limits.beam), limits.beam),
            _sizes("contexts", options.contexts or _doubling(LEAST_CONTEXT, limits.context, 4), limits.context),
        )

    def all(self) -> list[Bucket]:
        """Every bucket, the largest first, so that what the device cannot hold shows at once."""
        grid = itertools.product(self.batches, self.beams, self.contexts)
        return sorted(itertools.starmap(Bucket, grid), key=_size, reverse=True)

    def choose(self, batch: int, beam: int, context: int) -> Bucket:
        """The smallest bucket that holds a batch of these sizes, which must be within the limits."""
        return Bucket(_at_least(self.batches, batch), _at_least(self.beams, beam), _at_least(self.contexts, context))


def _size(bucket: Bucket) -> tuple[int, int]:
    return bucket.batch * bucket.beam, bucket.batch * bucket.context


def _batches(last: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ..."""
    sizes = {1, last} | {size for power in range(1, last.bit_length()) for size in (2 << power - 1, 3 << power - 1)}
    return tuple(sorted(size for size in sizes if size <= last))


def _doubling(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _sizes(name: str, sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    if sizes[-1] > limit:
        raise EngineError(f"{name} {tuple(sizes)}: expected sizes up to the limit {limit}")
    return tuple(sizes) if sizes[-1] == limit else (*sizes, limit)


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
