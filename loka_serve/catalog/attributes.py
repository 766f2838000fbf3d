"""Item attributes as coded columns: small to hold, quick to filter by, the same whatever the file they came from."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from loka_serve.errors import CatalogError

Scalar = str | int | float | bool
Kind = Literal["string", "number", "boolean"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LARGEST_EXACT_INTEGER = 2**53  # below it every whole float is exactly one integer


def attribute_text(value: object) -> tuple[str, Kind]:
    """The one text that stands for an attribute value, and its kind.

    Booleans read ``true`` and ``false``; a float that is a whole number reads like that integer, so that 3 in one file
    is 3.0 in another.

    Raises:
        ValueError: anything but a string, a finite number or a boolean.
    """
    if isinstance(value, str):
        return value, "string"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return ("true" if value else "false"), "boolean"
    if isinstance(value, int):
        return str(value), "number"
    if isinstance(value, float) and math.isfinite(value):
        whole = value.is_integer() and abs(value) < LARGEST_EXACT_INTEGER
        return (str(int(value)) if whole else repr(value)), "number"
    got = repr(value) if isinstance(value, float) else type(value).__name__
    raise ValueError(f"expected a string, a finite number, a boolean or a list of these, got {got}")


def _decode(text: str, kind: Kind) -> Scalar:
    if kind == "boolean":
        return text == "true"
    if kind == "number":
        return int(text) if text.lstrip("-").isdigit() else float(text)
    return text


@dataclass(frozen=True, eq=False)
class AttributeColumn:
    """One attribute of all items, by catalog index.

    Attributes:
        values: the distinct values as text (see :func:`attribute_text`), in ascending order of code points.
        codes: int32: positions in ``values``. With ``offsets`` None [items], -1 where the item has no value; otherwise
            [entries], the lists of all items one after the other.
        offsets: int64 [items + 1] for an attribute whose values are lists: the values of item ``i`` are the codes
            ``offsets[i]:offsets[i + 1]``, each at most once, in the order given; None for single values.
        kind: what the texts stand for; ``string`` if the items mix kinds.
    """

    values: tuple[str, ...]
    codes: NDArray[np.int32]
    offsets: NDArray[np.int64] | None
    kind: Kind

    @property
    def item_count(self) -> int:
        """Number of items."""
        return len(self.codes) if self.offsets is None else len(self.offsets) - 1

    @cached_property
    def code_of(self) -> dict[str, int]:
        """value -> code."""
        return {value: code for code, value in enumerate(self.values)}

    @cached_property
    def postings(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The items of each value: item indices int32, grouped by code, and offsets int64 [values + 1] into them."""
        if self.offsets is None:
            by_code = np.argsort(self.codes, kind="stable")[int(np.count_nonzero(self.codes < 0)) :]
            items = by_code.astype(np.int32)
        else:
            owners = np.repeat(np.arange(self.item_count, dtype=np.int32), np.diff(self.offsets))
            items = owners[np.argsort(self.codes, kind="stable")]
        counts = np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))
        return items, np.concatenate(([0], np.cumsum(counts))).astype(np.int64, copy=False)

    def value_of(self, item_index: int) -> Scalar | list[Scalar] | None:
        """What one item has: a value of the column's kind, or a list of them for a list attribute; None if missing."""
        if self.offsets is None:
            code = int(self.codes[item_index])
            return None if code < 0 else _decode(self.values[code], self.kind)
        codes = self.codes[self.offsets[item_index] : self.offsets[item_index + 1]]
        return [_decode(self.values[code], self.kind) for code in codes.tolist()]

    def items_with(self, values: Sequence[Scalar]) -> list[NDArray[np.int32]]:
        """The indices of the items that have any of ``values``, one array for each value known to the column."""
        items, offsets = self.postings
        codes = {self.code_of.get(attribute_text(value)[0], -1) for value in values}
        return [items[offsets[code] : offsets[code + 1]] for code in sorted(codes) if code >= 0]

    def take(self, order: NDArray[np.int64]) -> AttributeColumn:
        """The column of the items in another order: item ``i`` of the result is item ``order[i]`` of this one."""
        if self.offsets is None:
            return AttributeColumn(self.values, self.codes[order], None, self.kind)
        lengths = np.diff(self.offsets)[order]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64, copy=False)
        # Entry e of item i moves from offsets_before[order[i]] + (e - offsets_after[i]).
        source = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][order] - offsets[:-1], lengths)
        return AttributeColumn(self.values, self.codes[source], offsets, self.kind)


class InvalidValue(ValueError):
    """A value that no attribute has, at ``row``."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class AttributeBuilder:
    """Collects one attribute, some items at a time; holds a few bytes an item, never the parsed values themselves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows = array("i")
        self._codes = array("i")
        self._code_of: defaultdict[str, int] = defaultdict()
        self._code_of.default_factory = self._code_of.__len__  # a new text gets the next code
        self._kinds: set[Kind] = set()
        self._is_list = False

    def extend(self, first_row: int, values: Sequence[object]) -> None:
        """Record the values of the items from ``first_row`` on: for each a value, a list of values, or None.

        Rows must ascend from call to call; rows left out have no value.

        Raises:
            InvalidValue: a value of a type that no attribute has.
        """
        types = set(map(type, values)) - {type(None)}
        if types == {str}:  # by far the most common, so worth a way without a Python loop for each value
            self._kinds.add("string")
            self._rows.extend(row for row, value in enumerate(values, first_row) if value is not None)
            texts = (value for value in values if isinstance(value, str))
            self._codes.extend(map(self._code_of.__getitem__, texts))
            return
        for row, value in enumerate(values, first_row):
            try:
                self._add(row, value)
            except ValueError as error:
                raise InvalidValue(row, str(error)) from None

    def _add(self, row: int, value: object) -> None:
        if value is None:
            return
        if isinstance(value, (list, tuple)):
            self._is_list = True
            codes = dict.fromkeys(map(self._code, value))  # the same value twice says no more than once
            self._rows.extend([row] * len(codes))
            self._codes.extend(codes)
        else:
            self._codes.append(self._code(value))
            self._rows.append(row)

    def _code(self, value: object) -> int:
        if type(value) is str:
            self._kinds.add("string")
            return self._code_of[value]
        text, kind = attribute_text(value)
        self._kinds.add(kind)
        return self._code_of[text]

    def finish(self, items: int) -> AttributeColumn:
        """The column over ``items`` items, its values sorted.

        Raises:
            CatalogError: a value that is not valid Unicode text.
        """
        for text in self._code_of:
            if not is_valid_unicode(text):
                raise CatalogError(f"{self.name}: expected valid Unicode text, got {text!r}")
        texts = list(self._code_of)
        by_text = sorted(range(len(texts)), key=texts.__getitem__)
        rank = np.empty(len(texts), dtype=np.int32)
        rank[by_text] = np.arange(len(texts), dtype=np.int32)
        rows = np.array(self._rows, dtype=np.int64)
        entries = rank[np.array(self._codes, dtype=np.int64)]
        kind: Kind = next(iter(self._kinds)) if len(self._kinds) == 1 else "string"
        values = tuple(texts[position] for position in by_text)
        if self._is_list:
            lengths = np.bincount(rows, minlength=items)
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64, copy=False)
            return AttributeColumn(values, entries, offsets, kind)
        codes = np.full(items, -1, dtype=np.int32)
        codes[rows] = entries
        return AttributeColumn(values, codes, None, kind)


def is_valid_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8; a JSON escape may smuggle in half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
