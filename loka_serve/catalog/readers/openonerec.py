"""Reader of OpenOneRec ``sid2pid`` JSON: one object from packed semantic ID to the items that share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from loka_serve.catalog.readers.base import Source, read_json_object
from loka_serve.catalog.table import ItemTable, ItemTableBuilder
from loka_serve.catalog.trie import check_levels
from loka_serve.errors import CatalogError

PACKING_BASE = 8192  # key = c1 * 8192^2 + c2 * 8192 + c3, whatever the real codebook sizes
DEFAULT_LEVELS = 3
ID_FIELDS = ("pid", "iid")
SAMPLING_FIELD = "count_after_downsample"  # bookkeeping of that benchmark's sampling, nothing about the item


class OpenOneRecReader:
    """Keys are packed integers (``"8454660"``) or codes joined by dots (``"0.1032.516"``).

    Values are one item or a list of items: an id, or an object ``{"pid" or "iid": id, "count"?: popularity, ...}``,
    further fields being attributes. A packed key does not say how many levels it has: 3 unless ``levels`` or
    ``codebook_sizes`` says otherwise.
    """

    name = "OpenOneRec sid2pid JSON"

    def matches(self, source: Source) -> bool:
        """A .json file that holds an object (MiniOneRec's index and JSON Lines are recognised before)."""
        return source.suffix == ".json" and source.head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")

    def read(self, path: Path, codebook_sizes: Sequence[int] | None, levels: int | None) -> ItemTable:
        """See :class:`CatalogReader`; places are keys."""
        builder = ItemTableBuilder(path, "key", levels, codebook_sizes)
        packed_levels = builder.levels or DEFAULT_LEVELS
        for key, value in read_json_object(path).items():
            try:
                codes = _split_dotted(key) if "." in key else unpack_semantic_id(key, packed_levels)
            except ValueError as error:
                builder.fail(key, f"semantic_id: {error}")
            entries = value if isinstance(value, list) else [value]
            if not entries:
                builder.fail(key, "pid: expected at least one item, got an empty list")
            for entry in entries:
                if not isinstance(entry, dict):
                    builder.add(key, entry, codes)
                    continue
                id_field = next((field for field in ID_FIELDS if field in entry), None)
                if id_field is None:
                    builder.fail(key, f"pid: missing field, expected one of {', '.join(ID_FIELDS)}")
                builder.add(key, entry[id_field], codes, entry.get("count"), _attributes(entry))
        return builder.finish()


def unpack_semantic_id(key: str | int, levels: int = DEFAULT_LEVELS) -> list[int]:
    """The codes of a packed key, base 8192, first level most significant.

    Raises:
        ValueError: not a decimal integer, or more than ``levels`` codes.
    """
    text = str(key)
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(f"expected a packed integer or codes joined by dots, got {text!r}")
    rest = int(text)
    codes = [0] * levels
    for level in range(levels - 1, -1, -1):
        rest, codes[level] = divmod(rest, PACKING_BASE)
    if rest:
        raise ValueError(f"expected a packed key below {PACKING_BASE}^{levels} ({levels} levels), got {text}")
    return codes


def pack_semantic_id(codes: Iterable[int]) -> int:
    """The packed key of codes in 0..8191: the inverse of :func:`unpack_semantic_id`."""
    key = 0
    for code in codes:
        if not 0 <= code < PACKING_BASE:
            raise ValueError(f"expected codes in 0..{PACKING_BASE - 1}, got {code}")
        key = key * PACKING_BASE + code
    return key


def _split_dotted(key: str) -> list[int]:
    parts = key.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
        raise ValueError(f"expected codes joined by dots, got {key!r}")
    codes = [int(part) for part in parts]
    try:
        check_levels(len(codes))
    except CatalogError as error:
        raise ValueError(str(error).removeprefix("semantic_id: ")) from None
    return codes


def _attributes(entry: dict[str, object]) -> dict[str, object]:
    reserved = (*ID_FIELDS, "count", SAMPLING_FIELD)
    return {name: value for name, value in entry.items() if name not in reserved}
