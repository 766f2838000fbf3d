"""The items of a file before compilation, and the checks that every reader shares."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.attributes import AttributeBuilder, AttributeColumn, InvalidValue, is_valid_unicode
from loka_serve.catalog.trie import MAX_CODE, check_codebook_sizes, check_levels, infer_codebook_sizes
from loka_serve.errors import CatalogError

LARGEST_POPULARITY = float(np.finfo(np.float32).max)
PENDING_ITEMS = 4096

Place = int | str  # what tells a user where an item stands: a line number, a key


@dataclass(frozen=True, eq=False)
class ItemTable:
    """Items in file order, checked.

    Attributes:
        item_ids: distinct ids, one an item.
        semantic_ids: int32 [items, levels], every code within its codebook.
        popularity: float32 [items], finite; 0 where the file says nothing.
        attributes: columns over the same items, by name.
        codebook_sizes: the given sizes, or the inferred ones (largest code + 1).
    """

    item_ids: list[str]
    semantic_ids: NDArray[np.int32]
    popularity: NDArray[np.float32]
    attributes: dict[str, AttributeColumn]
    codebook_sizes: tuple[int, ...]


class ItemTableBuilder:
    """Takes items one by one, checks each field, and names file, place and field in every error.

    Args:
        source: the file, as errors name it.
        place_word: what a place is in this format: ``line``, ``key``, ``item``, ...
        levels: the number of codes every semantic ID must have, or None: what the first item has.
        codebook_sizes: one size for each level, or None: inferred.
    """

    def __init__(
        self,
        source: Path | str,
        place_word: str,
        levels: int | None = None,
        codebook_sizes: Sequence[int] | None = None,
    ) -> None:
        self.source = source
        self._place_word = place_word
        self._sizes = None if codebook_sizes is None else check_codebook_sizes(codebook_sizes, len(codebook_sizes))
        if self._sizes is not None and levels is not None and len(self._sizes) != levels:
            raise CatalogError(f"codebook_sizes: expected {levels} sizes, one for each level, got {len(self._sizes)}")
        self.levels = len(self._sizes) if self._sizes is not None else levels
        if self.levels is not None:
            check_levels(self.levels)
        self._row_of: dict[str, int] = {}
        self._places: list[Place] = []
        self._codes = array("i")
        self._popularity = array("d")
        self._attributes: dict[str, AttributeBuilder] = {}
        self._pending: list[Mapping[str, object]] = []  # attributes of the last items, not yet in their builders

    def fail(self, place: Place, message: str) -> NoReturn:
        """Raise :class:`CatalogError` about one place of the file."""
        shown = place if isinstance(place, int) else f'"{place}"'
        raise CatalogError(f"{self.source}, {self._place_word} {shown}: {message}")

    def add(
        self,
        place: Place,
        item_id: object,
        semantic_id: object,
        popularity: object = None,
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        """Add one item.

        Args:
            place: where it stands in the file.
            item_id: a string that is not empty, or an integer (kept as its decimal text).
            semantic_id: a list of integers.
            popularity: a finite number, or None for 0.
            attributes: by name strings, finite numbers, booleans, lists of these, or None. Checked some items later, in
                :meth:`finish` at the latest, since whole columns are faster.

        Raises:
            CatalogError: a field that is none of this, or an id that was there before.
        """
        text = self._item_id(place, item_id)
        row = len(self._row_of)
        first_row = self._row_of.setdefault(text, row)
        if first_row != row:
            first = self._places[first_row]
            self.fail(place, f'item_id: expected distinct ids, "{text}" is already at {self._place_word} {first}')
        self._places.append(place)
        self._add_codes(place, semantic_id)
        self._popularity.append(self._finite(place, popularity))
        self._pending.append(attributes or {})
        if len(self._pending) == PENDING_ITEMS:
            self._add_pending()

    def finish(self) -> ItemTable:
        """The table of all items added.

        Raises:
            CatalogError: no items, a code beyond its codebook, or text that is not valid Unicode.
        """
        self._add_pending()
        items = len(self._row_of)
        if items == 0 or self.levels is None:
            raise CatalogError(f"{self.source}: expected at least one item, found none")
        semantic_ids = np.array(self._codes, dtype=np.int32).reshape(items, self.levels)
        sizes = self._sizes or infer_codebook_sizes(semantic_ids)
        beyond = semantic_ids >= np.array(sizes)
        if beyond.any():
            row, level = (int(position) for position in np.argwhere(beyond)[0])
            code = semantic_ids[row, level]
            message = f"level {level} has code {code}, expected less than the codebook size {sizes[level]}"
            self.fail(self._places[row], f"semantic_id: {message}")
        try:
            attributes = {name: builder.finish(items) for name, builder in self._attributes.items()}
        except CatalogError as error:
            raise CatalogError(f"{self.source}: {error}") from None
        return ItemTable(
            item_ids=list(self._row_of),
            semantic_ids=semantic_ids,
            popularity=np.array(self._popularity, dtype=np.float32),
            attributes=attributes,
            codebook_sizes=sizes,
        )

    def _add_pending(self) -> None:
        first_row = len(self._places) - len(self._pending)
        for name in dict.fromkeys(itertools.chain.from_iterable(self._pending)):
            values = [attributes.get(name) for attributes in self._pending]
            builder = self._attributes.get(name)
            if builder is None:
                if not is_valid_unicode(name):
                    row = first_row + next(row for row, attributes in enumerate(self._pending) if name in attributes)
                    self.fail(self._places[row], f"{name!r}: expected valid Unicode text as the name of an attribute")
                builder = self._attributes[name] = AttributeBuilder(name)
            try:
                builder.extend(first_row, values)
            except InvalidValue as error:
                self.fail(self._places[error.row], f"{name}: {error}")
        self._pending.clear()

    def _item_id(self, place: Place, item_id: object) -> str:
        if isinstance(item_id, str) and item_id and (item_id.isascii() or is_valid_unicode(item_id)):
            return item_id
        if isinstance(item_id, (int, np.integer)) and not isinstance(item_id, bool):
            return str(item_id)
        self.fail(place, f"item_id: expected a string (not empty, valid Unicode) or an integer, got {item_id!r}")

    def _add_codes(self, place: Place, semantic_id: object) -> None:
        if isinstance(semantic_id, np.ndarray):
            semantic_id = semantic_id.tolist()
        if not isinstance(semantic_id, (list, tuple)):
            self.fail(place, f"semantic_id: expected a list of integers, got {semantic_id!r}")
        if self.levels is None:
            try:
                self.levels = check_levels(len(semantic_id))
            except CatalogError as error:
                self.fail(place, str(error))
        if len(semantic_id) != self.levels:
            self.fail(place, f"semantic_id: expected {self.levels} levels, got {len(semantic_id)}")
        for level, code in enumerate(semantic_id):
            if type(code) is int and 0 <= code <= MAX_CODE:
                continue
            if isinstance(code, bool) or not isinstance(code, (int, np.integer)):
                self.fail(place, f"semantic_id: expected an integer as code of level {level}, got {code!r}")
            if not 0 <= code <= MAX_CODE:
                self.fail(place, f"semantic_id: level {level} has code {code}, expected 0..{MAX_CODE}")
        self._codes.extend(semantic_id)

    def _finite(self, place: Place, popularity: object) -> float:
        if popularity is None:
            return 0.0
        if isinstance(popularity, np.generic):
            popularity = popularity.item()
        if isinstance(popularity, (int, float)) and not isinstance(popularity, bool):
            try:
                number = float(popularity)
            except OverflowError:
                number = math.inf
            if abs(number) <= LARGEST_POPULARITY:  # false for NaN
                return number + 0.0  # -0.0 and 0.0 are the same popularity
        self.fail(place, f"popularity: expected a finite number, got {popularity!r}")
