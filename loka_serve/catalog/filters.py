"""Which items and trie nodes a request may reach: exclusions and attribute predicates as node masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.attributes import AttributeColumn, Scalar
from loka_serve.catalog.trie import Trie
from loka_serve.errors import RequestError

SPARSE = 8  # below one allowed child in so many, marking parents one by one beats running counts over all (measured)


@dataclass(frozen=True, eq=False)
class CatalogFilter:
    """What is left of a catalog for one request.

    Attributes:
        allowed_items: bool [items], by catalog index.
        allowed_nodes: for each level, bool [N_l]: true iff an allowed item is below the node. So a beam on an allowed
            node always has an allowed child.
        legal_leaves: number of allowed leaves; 0 if no item is left.
    """

    allowed_items: NDArray[np.bool_]
    allowed_nodes: tuple[NDArray[np.bool_], ...]
    legal_leaves: int


def build_filter(
    trie: Trie,
    leaf_of_item: NDArray[np.int32],
    attributes: Mapping[str, AttributeColumn],
    exclude: Iterable[int],
    predicates: Mapping[str, Sequence[Scalar]],
) -> CatalogFilter | None:
    """The filter of one request, or None if it leaves out nothing. :meth:`Catalog.filter` documents the arguments."""
    excluded = _excluded_items(exclude, trie.item_count)
    if not predicates:
        return None if len(excluded) == 0 else _without(trie, leaf_of_item, excluded)
    allowed = _matching_items(attributes, predicates, trie.item_count)
    allowed[excluded] = False
    if allowed.all():
        return None
    return _only(trie, leaf_of_item, allowed)


def _excluded_items(exclude: Iterable[int], items: int) -> NDArray[np.int64]:
    """Distinct indices, ascending."""
    indices = exclude if isinstance(exclude, np.ndarray) else np.fromiter(exclude, dtype=np.int64)
    if len(indices) and not np.issubdtype(indices.dtype, np.integer):
        raise RequestError("exclude", f"expected integer item indices, got {indices.dtype}")
    distinct = np.unique(indices).astype(np.int64, copy=False)
    if len(distinct) and not (distinct[0] >= 0 and distinct[-1] < items):
        raise RequestError("exclude", f"expected item indices in 0..{items - 1}, got {distinct[0]}..{distinct[-1]}")
    return distinct


def _matching_items(
    attributes: Mapping[str, AttributeColumn], predicates: Mapping[str, Sequence[Scalar]], items: int
) -> NDArray[np.bool_]:
    """bool [items]: items that have, for every attribute named, any of the values given."""
    allowed: NDArray[np.bool_] | None = None
    for name, values in predicates.items():
        column = attributes.get(name)
        if column is None:
            known = ", ".join(sorted(attributes)) or "none"
            raise RequestError(f"filter.{name}", f"unknown attribute; known attributes: {known}")
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise RequestError(f"filter.{name}", f"expected a list of values, got {type(values).__name__}")
        try:
            postings = column.items_with(values)
        except ValueError as error:
            raise RequestError(f"filter.{name}", str(error)) from None
        matching = np.zeros(items, dtype=np.bool_)
        for posting in postings:
            matching[posting] = True
        allowed = matching if allowed is None else allowed & matching
    assert allowed is not None  # the caller gives at least one predicate
    return allowed


def _without(trie: Trie, leaf_of_item: NDArray[np.int32], excluded: NDArray[np.int64]) -> CatalogFilter:
    """Everything but ``excluded``. A node dies when all below it is dead; only nodes above exclusions are visited."""
    allowed_items = np.ones(trie.item_count, dtype=np.bool_)
    allowed_items[excluded] = False
    allowed_nodes = tuple(np.ones(count, dtype=np.bool_) for count in trie.node_counts)
    child_offsets, owners = trie.item_offsets, leaf_of_item[excluded]
    legal_leaves = trie.leaf_count
    for level in range(trie.levels - 1, -1, -1):
        touched, dead_children = np.unique(owners, return_counts=True)
        dead = touched[dead_children == child_offsets[touched + 1] - child_offsets[touched]]
        allowed_nodes[level][dead] = False
        if level == trie.levels - 1:
            legal_leaves -= len(dead)
        if level > 0:
            child_offsets, owners = trie.child_offsets[level - 1], trie.parents[level - 1][dead]
    return CatalogFilter(allowed_items, allowed_nodes, legal_leaves)


def _only(trie: Trie, leaf_of_item: NDArray[np.int32], allowed_items: NDArray[np.bool_]) -> CatalogFilter:
    """Exactly ``allowed_items``, by marking the parents of what is allowed, level by level up to the root."""
    allowed_nodes = [_above(allowed_items, trie.item_offsets, leaf_of_item)]
    for level in range(trie.levels - 2, -1, -1):
        allowed_nodes.append(_above(allowed_nodes[-1], trie.child_offsets[level], trie.parents[level]))
    return CatalogFilter(allowed_items, tuple(reversed(allowed_nodes)), int(np.count_nonzero(allowed_nodes[0])))


def _above(allowed: NDArray[np.bool_], offsets: NDArray[np.int64], parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which nodes have an allowed child (or item): bool [nodes] from bool [children]."""
    positions = np.flatnonzero(allowed)
    if len(positions) * SPARSE < len(allowed):
        above = np.zeros(len(offsets) - 1, dtype=np.bool_)
        above[parents[positions]] = True
        return above
    counts = np.zeros(len(allowed) + 1, dtype=np.int32)
    np.cumsum(allowed, out=counts[1:])
    return np.diff(counts[offsets]) > 0
