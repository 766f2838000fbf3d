"""The compiled catalog: items, their semantic IDs as a trie, and their attributes, by one item index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.attributes import AttributeColumn, Scalar
from loka_serve.catalog.filters import CatalogFilter, build_filter
from loka_serve.catalog.item_index import ItemIndex
from loka_serve.catalog.table import ItemTable, ItemTableBuilder
from loka_serve.catalog.trie import Trie, compile_trie
from loka_serve.catalog.version import content_version


@dataclass(frozen=True, eq=False)
class Catalog:
    """Items in catalog order: by semantic ID (lexicographic), then popularity (descending), then ``item_id``.

    The position in that order is the item index that all arrays share. The compiled form depends on nothing but the
    items, so a lower index winning a tie means the same everywhere. Treat all arrays as read-only.

    Attributes:
        trie: the distinct semantic IDs; ``trie.item_offsets`` maps each leaf to its items.
        item_ids: ids by item index.
        leaf_of_item: int32 [items]: the leaf of each item.
        popularity: float32 [items]; 0 where unknown.
        attributes: columns by name (titles are an attribute too).
        version: 16 hexadecimal digits, a hash of the content: independent of input order and file format.
    """

    trie: Trie
    item_ids: list[str]
    leaf_of_item: NDArray[np.int32]
    popularity: NDArray[np.float32]
    attributes: dict[str, AttributeColumn]
    version: str

    @classmethod
    def build(
        cls,
        item_ids: Sequence[str | int],
        semantic_ids: Sequence[Sequence[int]] | NDArray[np.integer[Any]],
        popularity: Sequence[float] | NDArray[np.floating[Any]] | None = None,
        attributes: Mapping[str, Sequence[object]] | None = None,
        codebook_sizes: Sequence[int] | None = None,
    ) -> Catalog:
        """Compile items given as columns of equal length.

        Args:
            item_ids: distinct ids.
            semantic_ids: [items, levels] codes, 2 to 5 levels.
            popularity: finite numbers, or None for all equal.
            attributes: name -> values: strings, numbers, booleans, lists of these, or None.
            codebook_sizes: one for each level; inferred as largest code + 1 if None.

        Raises:
            CatalogError: naming the item (by position) and field that is wrong.
            ValueError: columns of different lengths.
        """
        columns = attributes or {}
        rows = semantic_ids.tolist() if isinstance(semantic_ids, np.ndarray) else semantic_ids
        counts = [None] * len(item_ids) if popularity is None else popularity
        lengths = sorted({len(item_ids), len(rows), len(counts), *map(len, columns.values())})
        if len(lengths) > 1:
            raise ValueError(f"expected columns of equal length, got lengths {lengths}")
        builder = ItemTableBuilder("items", "position", codebook_sizes=codebook_sizes)
        for row, item_id in enumerate(item_ids):
            values = {name: column[row] for name, column in columns.items()}
            builder.add(row, item_id, rows[row], counts[row], values)
        return compile_catalog(builder.finish())

    @property
    def item_count(self) -> int:
        """Number of items."""
        return len(self.item_ids)

    @property
    def levels(self) -> int:
        """Number of codes of a semantic ID."""
        return self.trie.levels

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Number of codes of each level's codebook."""
        return self.trie.codebook_sizes

    @cached_property
    def _item_index(self) -> ItemIndex:
        return ItemIndex(self.item_ids)

    def index_of(self, item_id: str) -> int | None:
        """The index of an item, or None if the catalog does not have it; for many items see `indices_of`."""
        index = int(self.indices_of([item_id])[0])
        return None if index < 0 else index

    def indices_of(self, item_ids: Sequence[str]) -> NDArray[np.int64]:
        """The index of each of many items, int64 [len(item_ids)], -1 for those that the catalog does not have."""
        return self._item_index.find(item_ids)

    def semantic_id(self, index: int) -> tuple[int, ...]:
        """The codes of one item."""
        return tuple(self.trie.semantic_ids()[self.leaf_of_item[index]].tolist())

    def semantic_ids(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """The codes of many items, int32 [len(indices), levels]."""
        return self.trie.semantic_ids()[self.leaf_of_item[np.asarray(indices, dtype=np.int64)]]

    def items_of(self, leaf: int) -> range:
        """The indices of the items on one leaf, most popular first."""
        return range(int(self.trie.item_offsets[leaf]), int(self.trie.item_offsets[leaf + 1]))

    def filter(
        self, exclude: Iterable[int] = (), predicates: Mapping[str, Sequence[Scalar]] | None = None
    ) -> CatalogFilter | None:
        """The masks of a request that must leave some items out.

        Args:
            exclude: item indices to leave out; repeats are allowed.
            predicates: attribute -> values. An item stays if for every attribute it has any of the values (an item with
                a list of values: if any of them matches). A value that no item has, an empty list of values and an item
                without the attribute match nothing.

        Returns:
            None if nothing is left out; otherwise the masks, with ``legal_leaves`` 0 if everything is.

        Raises:
            RequestError: ``filter.<name>``: an unknown attribute or a value of a wrong type; ``exclude``: an index out
                of range.
        """
        return build_filter(self.trie, self.leaf_of_item, self.attributes, exclude, predicates or {})

    def save(self, path: Path | str) -> None:
        """Write the compiled catalog as one safetensors file, replacing ``path`` at once or not at all."""
        from loka_serve.catalog.storage import save_catalog

        save_catalog(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Catalog:
        """Read what :meth:`save` wrote.

        Raises:
            CatalogError: naming the file and what was expected, if it is missing, damaged or not a compiled catalog.
        """
        from loka_serve.catalog.storage import load_catalog

        return load_catalog(Path(path))


def compile_catalog(table: ItemTable) -> Catalog:
    """Compile checked items into a catalog."""
    # Items sorted by id first: that is the canonical order to hash, and what breaks ties inside a semantic ID.
    by_id = np.array(sorted(range(len(table.item_ids)), key=table.item_ids.__getitem__), dtype=np.int64)
    item_ids = [table.item_ids[row] for row in by_id.tolist()]
    semantic_ids, popularity = table.semantic_ids[by_id], table.popularity[by_id]
    attributes = {name: column.take(by_id) for name, column in sorted(table.attributes.items())}
    version = content_version(item_ids, semantic_ids, popularity, attributes)
    trie, order = compile_trie(semantic_ids, popularity, table.codebook_sizes)
    return Catalog(
        trie=trie,
        item_ids=[item_ids[row] for row in order.tolist()],
        leaf_of_item=leaf_of_items(trie),
        popularity=popularity[order],
        attributes={name: column.take(order) for name, column in attributes.items()},
        version=version,
    )


def leaf_of_items(trie: Trie) -> NDArray[np.int32]:
    """int32 [items]: the leaf of each item."""
    return np.repeat(np.arange(trie.leaf_count, dtype=np.int32), np.diff(trie.item_offsets))
