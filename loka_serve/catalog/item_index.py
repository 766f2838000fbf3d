"""Item ids -> indices, thousands at a time.

A dictionary of a million ids answers from main memory: every lookup waits for its entry and for its key, 0.8 us, so
that a history of 3,000 items takes the server 2.4 ms. This table answers with a few gathers over all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ItemIndex:
    """A hash table of arrays, keyed by Python's hash of the id: 64 bits, keyed with a secret of the process.

    Ids are told apart by that hash alone. That an unknown id has the hash of a known one happens once in 2^64 / items
    lookups; it would be taken for that item. Known ids cannot be mistaken for each other: `__init__` checks them.
    """

    def __init__(self, item_ids: Sequence[str]) -> None:
        hashes = _hashes(item_ids)
        self._mask = (1 << max(1, len(item_ids)).bit_length()) - 1
        order = np.argsort(hashes & self._mask, kind="stable")
        counts = np.bincount(hashes & self._mask, minlength=self._mask + 1)
        self._first = np.zeros(self._mask + 2, np.int32)
        np.cumsum(counts, out=self._first[1:])
        self._hashes, self._indices = hashes[order], order.astype(np.int32)
        self._twins = self._find_twins(item_ids, hashes)

    @staticmethod
    def _find_twins(item_ids: Sequence[str], hashes: NDArray[np.int64]) -> dict[str, int]:
        """Ids whose hash another id has: looked up by name."""
        ascending = np.sort(hashes)
        repeated = ascending[1:][ascending[1:] == ascending[:-1]]
        return {item_ids[index]: index for index in np.flatnonzero(np.isin(hashes, repeated)).tolist()}

    def find(self, item_ids: Sequence[str]) -> NDArray[np.int64]:
        """The index of each id, int64 [len(item_ids)], -1 for those that are not there."""
        hashes = _hashes(item_ids)
        bucket = hashes & self._mask
        at, end = self._first[bucket], self._first[bucket + 1]
        found = np.full(len(item_ids), -1, np.int64)
        pending = np.flatnonzero(at < end)
        while len(pending):
            place = at[pending]
            hit = self._hashes[place] == hashes[pending]
            found[pending[hit]] = self._indices[place[hit]]
            at[pending] += 1
            pending = pending[~hit & (at[pending] < end[pending])]
        if self._twins:
            for position, item_id in enumerate(item_ids):
                found[position] = self._twins.get(item_id, found[position])
        return found


def _hashes(item_ids: Sequence[str]) -> NDArray[np.int64]:
    return np.fromiter(map(hash, item_ids), np.int64, len(item_ids))
