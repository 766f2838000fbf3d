"""The trie of every semantic ID that exists, as flat arrays: what constrained decoding walks through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loka_serve.errors import CatalogError

MIN_LEVELS = 2
MAX_LEVELS = 5
MAX_CODE = 2**31 - 2  # the size of a codebook (largest code + 1) still fits an int32


@dataclass(frozen=True, eq=False)
class Trie:
    """Semantic IDs in compressed sparse row form; codes are local to their level.

    Level ``l`` has ``N_l`` nodes, one for each distinct prefix of ``l + 1`` codes, numbered in lexicographic order of
    that prefix. Hence the children of a node are neighbours, their codes ascend, and the nodes of the last level (the
    leaves) are the distinct semantic IDs in lexicographic order. Every node has at least one child or item below it.

    Attributes:
        codebook_sizes: number of codes of each level's codebook, in level order.
        tokens: for each level, int32 [N_l]: the code of each node.
        child_offsets: for each level but the last, int64 [N_l + 1]: the children of node ``n`` of level ``l`` are the
            nodes ``child_offsets[l][n]:child_offsets[l][n + 1]`` of level ``l + 1``; level 0 hangs from the root.
        item_offsets: int64 [leaves + 1]: the items of leaf ``n`` are the items ``item_offsets[n]:item_offsets[n + 1]``.
    """

    codebook_sizes: tuple[int, ...]
    tokens: tuple[NDArray[np.int32], ...]
    child_offsets: tuple[NDArray[np.int64], ...]
    item_offsets: NDArray[np.int64]

    @property
    def levels(self) -> int:
        """Number of codes of a semantic ID."""
        return len(self.tokens)

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Number of nodes of each level; the last one is the number of distinct semantic IDs."""
        return tuple(len(level_tokens) for level_tokens in self.tokens)

    @property
    def leaf_count(self) -> int:
        """Number of distinct semantic IDs."""
        return len(self.tokens[-1])

    @property
    def item_count(self) -> int:
        """Number of items on all leaves together."""
        return int(self.item_offsets[-1])

    @cached_property
    def parents(self) -> tuple[NDArray[np.int32], ...]:
        """For levels 1 and up, int32 [N_l]: ``parents[l - 1][n]`` is the node of level ``l - 1`` above node ``n``."""
        return tuple(
            np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets)) for offsets in self.child_offsets
        )

    @cached_property
    def _semantic_ids(self) -> NDArray[np.int32]:
        semantic_ids = np.empty((self.leaf_count, self.levels), dtype=np.int32)
        nodes: NDArray[Any] = np.arange(self.leaf_count)
        semantic_ids[:, -1] = self.tokens[-1]
        for level in range(self.levels - 2, -1, -1):
            nodes = self.parents[level][nodes]
            semantic_ids[:, level] = self.tokens[level][nodes]
        semantic_ids.setflags(write=False)  # one copy is shared by all callers
        return semantic_ids

    def semantic_ids(self) -> NDArray[np.int32]:
        """The semantic ID of every leaf, int32 [leaves, levels], in lexicographic order; read-only."""
        return self._semantic_ids

    def leaf_of(self, semantic_id: Sequence[int]) -> int:
        """The leaf of a semantic ID, or -1 if the catalog does not have it (as with another number of levels)."""
        if len(semantic_id) != self.levels:
            return -1
        begin, end, node = 0, len(self.tokens[0]), -1
        for level, code in enumerate(semantic_id):
            if not 0 <= code < self.codebook_sizes[level]:
                return -1
            siblings = self.tokens[level][begin:end]
            position = int(np.searchsorted(siblings, np.int32(code)))  # the same type, or the siblings would be copied
            if position == len(siblings) or siblings[position] != code:
                return -1
            node = begin + position
            if level < self.levels - 1:
                begin, end = int(self.child_offsets[level][node]), int(self.child_offsets[level][node + 1])
        return node

    def leaves_of(self, semantic_ids: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """``leaf_of`` for many semantic IDs, integers [n, levels], without a Python loop over them: int32 [n]."""
        leaves = np.full(len(semantic_ids), -1, dtype=np.int32)
        if semantic_ids.ndim != 2 or semantic_ids.shape[1] != self.levels:
            return leaves
        inside = ((semantic_ids >= 0) & (semantic_ids < np.array(self.codebook_sizes))).all(axis=1)
        rows = np.flatnonzero(inside)  # of the semantic IDs whose prefix is found so far
        nodes = begins = ends = np.empty(0, dtype=np.int64)
        for level, tokens in enumerate(self.tokens):
            codes = semantic_ids[rows, level].astype(np.int32)  # they are inside the codebook, so nothing is cut off
            if level == 0:  # one range for all: numpy's own search is faster
                positions, ends = np.searchsorted(tokens, codes), np.full(len(rows), len(tokens), dtype=np.int64)
            else:
                positions = _first_not_below(tokens, begins, ends, codes)
            found = positions < ends
            found[found] = tokens[positions[found]] == codes[found]
            rows, nodes = rows[found], positions[found]
            if level < self.levels - 1:
                begins, ends = self.child_offsets[level][nodes], self.child_offsets[level][nodes + 1]
        leaves[rows] = nodes
        return leaves


def _first_not_below(
    tokens: NDArray[np.int32],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    codes: NDArray[np.int32],
) -> NDArray[np.int64]:
    """``searchsorted`` of each code in a range of its own: the first position of ``begins:ends`` with a token that is
    not below the code, or the range's end."""
    begins, ends = begins.copy(), ends.copy()
    longest = int((ends - begins).max(initial=0))
    for _ in range(longest.bit_length()):
        middles = (begins + ends) >> 1
        # Once a range is empty its middle is its end, where there may be no token: nothing changes any more.
        below = (begins < ends) & (tokens[np.minimum(middles, len(tokens) - 1)] < codes)
        begins = np.where(below, middles + 1, begins)
        ends = np.where(below, ends, middles)
    return begins


def infer_codebook_sizes(semantic_ids: NDArray[np.integer[Any]]) -> tuple[int, ...]:
    """The smallest codebooks that hold ``semantic_ids`` [items, levels]: the largest code of each level + 1.

    A model's real codebooks may be larger when no item uses their last codes; give the sizes wherever they are known.
    """
    return tuple(int(code) + 1 for code in semantic_ids.max(axis=0))


def check_codebook_sizes(codebook_sizes: Sequence[int], levels: int) -> tuple[int, ...]:
    """Return the sizes as a tuple, or raise :class:`CatalogError` unless there is one, at least 1, for each level."""
    sizes = tuple(int(size) for size in codebook_sizes)
    if len(sizes) != levels:
        raise CatalogError(f"codebook_sizes: expected {levels} sizes, one for each level, got {len(sizes)}")
    if min(sizes) < 1 or max(sizes) > MAX_CODE + 1:
        raise CatalogError(f"codebook_sizes: expected sizes in 1..{MAX_CODE + 1}, got {list(sizes)}")
    return sizes


def check_levels(levels: int) -> int:
    """Return ``levels``, or raise :class:`CatalogError` unless semantic IDs may have that many."""
    if not MIN_LEVELS <= levels <= MAX_LEVELS:
        raise CatalogError(f"semantic_id: expected {MIN_LEVELS} to {MAX_LEVELS} levels, got {levels}")
    return levels


def compile_trie(
    semantic_ids: NDArray[np.integer[Any]],
    popularity: NDArray[np.floating[Any]] | None = None,
    codebook_sizes: Sequence[int] | None = None,
) -> tuple[Trie, NDArray[np.int64]]:
    """Compile the semantic IDs of a list of items.

    Args:
        semantic_ids: integers [items, levels], 2 to 5 levels, codes from 0; several items may share one semantic ID.
        popularity: numbers [items], or None if all items are equally popular.
        codebook_sizes: one size for each level; inferred as largest code + 1 if None.

    Returns:
        The trie, and ``order``, int64 [items]: ``order[i]`` is the input position of the item at catalog index ``i``.
        Catalog order is by semantic ID (lexicographic), then popularity (descending), then input position.

    Raises:
        CatalogError: no items, a bad shape or type, or a code outside its codebook.
    """
    codes = np.asarray(semantic_ids)
    if codes.ndim != 2 or not np.issubdtype(codes.dtype, np.integer):
        raise CatalogError(f"semantic_id: expected integers [items, levels], got {codes.dtype} {list(codes.shape)}")
    items, levels = codes.shape
    check_levels(levels)
    if items == 0:
        raise CatalogError("a catalog needs at least one item, got none")
    if int(codes.min()) < 0 or int(codes.max()) > MAX_CODE:
        raise CatalogError(f"semantic_id: expected codes in 0..{MAX_CODE}, got {codes.min()}..{codes.max()}")
    largest = infer_codebook_sizes(codes)
    sizes = largest if codebook_sizes is None else check_codebook_sizes(codebook_sizes, levels)
    for level, (needed, size) in enumerate(zip(largest, sizes, strict=True)):
        if needed > size:
            raise CatalogError(f"semantic_id: level {level} has code {needed - 1}, expected less than {size}")

    order = _catalog_order(codes, popularity)
    ordered = codes[order]
    starts: list[NDArray[np.int64]] = []  # per level: the first item of each node
    new_prefix = np.zeros(items, dtype=np.bool_)
    new_prefix[0] = True
    for level in range(levels):
        new_prefix[1:] |= ordered[1:, level] != ordered[:-1, level]
        starts.append(np.flatnonzero(new_prefix).astype(np.int64, copy=False))
    ends = [np.append(level_starts, items) for level_starts in starts]
    trie = Trie(
        codebook_sizes=sizes,
        tokens=tuple(ordered[starts[level], level].astype(np.int32) for level in range(levels)),
        child_offsets=tuple(
            np.searchsorted(starts[level + 1], ends[level]).astype(np.int64, copy=False) for level in range(levels - 1)
        ),
        item_offsets=ends[-1],
    )
    return trie, order


def _catalog_order(codes: NDArray[np.integer[Any]], popularity: NDArray[np.floating[Any]] | None) -> NDArray[np.int64]:
    """Stable order by semantic ID, then popularity descending. ``lexsort`` takes its most significant key last."""
    keys: list[NDArray[Any]] = [codes[:, level] for level in range(codes.shape[1] - 1, -1, -1)]
    if popularity is not None:
        if popularity.shape != (len(codes),):
            raise CatalogError(f"popularity: expected one number for each of {len(codes)} items")
        keys.insert(0, -popularity)
    return np.lexsort(keys).astype(np.int64, copy=False)
