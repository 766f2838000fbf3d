"""A catalog of many made-up semantic IDs, skewed as real ones are: a few prefixes hold most of the items."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.trie import Trie

EXPONENT = 0.8
"""Of Zipf's law over the codes of each level. At 8,192 codes the first one then gets about 3 % of the draws."""

Keys = NDArray[np.int64]


def skewed_trie(
    items: int = 10_000_000,
    codebook_sizes: Sequence[int] = (8192, 8192, 8192),
    seed: int = 0,
    exponent: float = EXPONENT,
) -> Trie:
    """Compile `items` distinct semantic IDs, one item each.

    The codes below each prefix follow Zipf's law, in an order of popularity that differs from prefix to prefix.

    Args:
        exponent: 0 (no skew) or more, below 1.

    Raises:
        ValueError: more items than half of the semantic IDs that the codebooks can form; an exponent out of range.
    """
    if not 0 <= exponent < 1:
        raise ValueError(f"exponent {exponent}: expected 0 or more, below 1")
    sizes = tuple(codebook_sizes)
    possible = math.prod(sizes)
    if not 1 <= items <= possible // 2:
        raise ValueError(f"{items} items: expected 1 to {possible // 2}, half of the IDs that {sizes} can form")
    generator = np.random.default_rng(seed)
    keys = np.empty(0, dtype=np.int64)
    skewed = True
    while len(keys) < items:
        draws = int((items - len(keys)) * 1.3) + 64
        drawn = _draw(generator, draws, sizes, exponent) if skewed else generator.integers(0, possible, draws)
        found = _distinct(np.concatenate([keys, drawn]))
        # Small codebooks run out of popular IDs: fill up with any.
        skewed = skewed and len(found) - len(keys) > draws // 10
        keys = found
    surplus = generator.choice(len(keys), len(keys) - items, replace=False)
    return _compile(np.delete(keys, surplus), sizes)


def _draw(generator: np.random.Generator, draws: int, sizes: tuple[int, ...], exponent: float) -> Keys:
    """Semantic IDs with repetitions, each packed into one integer: the codes are its digits, `sizes` their bases."""
    keys = np.zeros(draws, dtype=np.int64)
    for size in sizes:
        # The inverse of the continuous law's distribution function: ten times faster than a search in a table of sums.
        spread = (size + 1) ** (1 - exponent) - 1
        ranks = ((generator.random(draws) * spread + 1) ** (1 / (1 - exponent)) - 1).astype(np.int64)
        ranks = np.minimum(ranks, size - 1)  # rounding may reach the end
        # A rank's code: a walk through the codebook in strides, from a start that a hash of the prefix chooses.
        start = (keys * 2_654_435_761 >> 12) % size
        keys = keys * size + (ranks * _stride(size) + start) % size
    return keys


def _stride(size: int) -> int:
    """A step that visits every code of a codebook, and puts neighbours in popularity far apart."""
    stride = max(1, round(size * 0.618))
    while math.gcd(stride, size) != 1:
        stride += 1
    return stride


def _distinct(keys: Keys) -> Keys:
    """Sorted and without repetitions; numpy's `unique` of so many integers takes ten times as long."""
    keys = np.sort(keys)
    return keys[_starts(keys)]


def _starts(keys: Keys) -> NDArray[np.int64]:
    """Positions in sorted keys that differ from the one before."""
    return np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])).astype(np.int64, copy=False)


def _compile(keys: Keys, sizes: tuple[int, ...]) -> Trie:
    """The trie of sorted, distinct packed semantic IDs; see `loka_serve.catalog.trie` for its arrays."""
    tokens: list[NDArray[np.int32]] = []
    child_offsets: list[NDArray[np.int64]] = []
    prefixes = keys
    for size in reversed(sizes):
        # `prefixes` are those of this level; those without the last code are the nodes one level up.
        tokens.insert(0, (prefixes % size).astype(np.int32))
        above = prefixes // size
        starts = _starts(above)
        child_offsets.insert(0, np.append(starts, len(prefixes)))
        prefixes = above[starts]
    # The last round made the root, whose children are the whole first level.
    return Trie(sizes, tuple(tokens), tuple(child_offsets[1:]), np.arange(len(keys) + 1, dtype=np.int64))
