"""Reader of JSON Lines: one object a line, ``{"item_id", "semantic_id", "popularity"?, ...attributes}``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loka_serve.catalog.readers.base import Source, read_json_lines
from loka_serve.catalog.table import ItemTable, ItemTableBuilder

REQUIRED_FIELDS = ("item_id", "semantic_id")


class JsonLinesReader:
    """``item_id`` string or integer, ``semantic_id`` list of integers, ``popularity`` number, the rest attributes."""

    name = "JSON Lines"

    def matches(self, source: Source) -> bool:
        """By the extension .jsonl or .ndjson, or a first line that is a whole object with an ``item_id``."""
        if source.suffix in (".jsonl", ".ndjson"):
            return True
        first_line = source.head.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0].rstrip()
        return first_line.startswith(b"{") and first_line.endswith(b"}") and b'"item_id"' in first_line

    def read(self, path: Path, codebook_sizes: Sequence[int] | None, levels: int | None) -> ItemTable:
        """See :class:`CatalogReader`; places are lines."""
        builder = ItemTableBuilder(path, "line", levels, codebook_sizes)
        for number, item in read_json_lines(path):
            for field in REQUIRED_FIELDS:
                if field not in item:
                    builder.fail(number, f"{field}: missing field")
            item_id, semantic_id = item.pop("item_id"), item.pop("semantic_id")
            builder.add(number, item_id, semantic_id, item.pop("popularity", None), attributes=item)
        return builder.finish()
