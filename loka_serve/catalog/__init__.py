"""The catalog: readers of item files, the trie of semantic IDs, item attributes and request filters."""

from loka_serve.catalog.attributes import AttributeColumn
from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.filters import CatalogFilter
from loka_serve.catalog.histories import History, read_histories
from loka_serve.catalog.readers import read_catalog
from loka_serve.catalog.trie import Trie, compile_trie

__all__ = [
    "AttributeColumn",
    "Catalog",
    "CatalogFilter",
    "History",
    "Trie",
    "compile_trie",
    "read_catalog",
    "read_histories",
]
