"""Reader of Parquet: columns ``item_id``, ``semantic_id`` (list of integers), ``popularity``?, and attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from loka_serve.catalog.readers.base import Source
from loka_serve.catalog.readers.jsonl import REQUIRED_FIELDS
from loka_serve.catalog.table import ItemTable, ItemTableBuilder
from loka_serve.errors import CatalogError

MAGIC = b"PAR1"
BATCH_ROWS = 65_536


class ParquetReader:
    """The same fields as JSON Lines, as columns; read in batches. Needs pyarrow (the extra ``parquet``)."""

    name = "Parquet"

    def matches(self, source: Source) -> bool:
        """By the first bytes, or the extension .parquet."""
        return source.head.startswith(MAGIC) or source.suffix == ".parquet"

    def read(self, path: Path, codebook_sizes: Sequence[int] | None, levels: int | None) -> ItemTable:
        """See :class:`CatalogReader`; places are rows, from 0."""
        builder = ItemTableBuilder(path, "row", levels, codebook_sizes)
        row = 0
        for columns in _read_batches(path):
            item_ids, semantic_ids = columns.pop("item_id"), columns.pop("semantic_id")
            popularity = columns.pop("popularity", [None] * len(item_ids))
            names = list(columns)
            for item_id, semantic_id, count, *values in zip(
                item_ids, semantic_ids, popularity, *columns.values(), strict=True
            ):
                builder.add(row, item_id, semantic_id, count, dict(zip(names, values, strict=True)))
                row += 1
        return builder.finish()


def _read_batches(path: Path) -> Iterator[dict[str, list[object]]]:
    """Column name -> Python values, a batch of rows at a time."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise CatalogError(f"{path}: reading Parquet needs pyarrow; install loka-serve[parquet]") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield {name: batch.column(name).to_pylist() for name in batch.schema.names}
    except CatalogError:
        raise
    except Exception as error:  # damaged files raise Arrow's errors, OSError, UnicodeDecodeError, ...
        raise CatalogError(f"{path}: expected a Parquet file, got: {error}") from None


def _check_columns(path: Path, names: list[str]) -> None:
    shown = ", ".join(names)
    if len(set(names)) != len(names):
        raise CatalogError(f"{path}: expected distinct column names, got {shown}")
    for field in REQUIRED_FIELDS:
        if field not in names:
            raise CatalogError(f"{path}: {field}: missing column; the columns are {shown}")
