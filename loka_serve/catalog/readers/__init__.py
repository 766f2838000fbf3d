"""Readers of item files: :func:`read_catalog` picks one by content and extension."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loka_serve.catalog.catalog import Catalog, compile_catalog
from loka_serve.catalog.readers.base import HEAD_BYTES, CatalogReader, Source
from loka_serve.catalog.readers.jsonl import JsonLinesReader
from loka_serve.catalog.readers.minionerec import MiniOneRecReader
from loka_serve.catalog.readers.openonerec import OpenOneRecReader
from loka_serve.catalog.readers.parquet import ParquetReader
from loka_serve.catalog.readers.tensor import TensorReader
from loka_serve.catalog.storage import is_compiled_catalog
from loka_serve.catalog.trie import check_codebook_sizes
from loka_serve.errors import CatalogError

__all__ = [
    "READERS",
    "CatalogReader",
    "JsonLinesReader",
    "MiniOneRecReader",
    "OpenOneRecReader",
    "ParquetReader",
    "TensorReader",
    "read_catalog",
]

# The first that matches reads: OpenOneRec takes any JSON object, so it comes after those with a clearer mark.
READERS: tuple[CatalogReader, ...] = (
    ParquetReader(),
    TensorReader(),
    JsonLinesReader(),
    MiniOneRecReader(),
    OpenOneRecReader(),
)


def read_catalog(path: Path | str, codebook_sizes: Sequence[int] | None = None, levels: int | None = None) -> Catalog:
    """Read and compile the items of a file or directory, whatever its format; a compiled catalog is loaded as it is.

    Args:
        path: a file of one of :data:`READERS`, a MiniOneRec directory, or what :meth:`Catalog.save` wrote.
        codebook_sizes: the model's codebook sizes; if None, inferred as largest code + 1 of each level.
        levels: the number of codes a semantic ID must have; needed only for packed OpenOneRec keys that are not of 3.

    Raises:
        CatalogError: naming file, line or key, field, and what was expected.
    """
    path = Path(path)
    if path.is_dir():
        head = b""
    elif not path.is_file():
        raise CatalogError(f"{path}: no such file or directory")
    else:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if not head:
            raise CatalogError(f"{path}: expected items, the file is empty")
    if path.suffix.lower() == ".safetensors" and is_compiled_catalog(path):
        return _load_compiled(path, codebook_sizes, levels)
    source = Source(path, head)
    for reader in READERS:
        if reader.matches(source):
            return compile_catalog(reader.read(path, codebook_sizes, levels))
    formats = "; ".join(reader.name for reader in READERS)
    raise CatalogError(f"{path}: not a known item file; expected one of: {formats}")


def _load_compiled(path: Path, codebook_sizes: Sequence[int] | None, levels: int | None) -> Catalog:
    catalog = Catalog.load(path)
    if levels is not None and levels != catalog.levels:
        raise CatalogError(f"{path}: semantic_id: expected {levels} levels, got {catalog.levels}")
    sizes = catalog.codebook_sizes
    if codebook_sizes is not None and check_codebook_sizes(codebook_sizes, catalog.levels) != sizes:
        raise CatalogError(f"{path}: expected codebook sizes {list(codebook_sizes)}, got {list(sizes)}")
    return catalog
