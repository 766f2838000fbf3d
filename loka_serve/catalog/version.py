"""The content hash that names a catalog: equal content, equal version, in whatever order and format it was read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.attributes import AttributeColumn

VERSION_LENGTH = 16  # hexadecimal digits
_CHUNK = 65_536  # strings encoded at a time


def content_version(
    item_ids: Sequence[str],
    semantic_ids: NDArray[np.int32],
    popularity: NDArray[np.float32],
    attributes: Mapping[str, AttributeColumn],
) -> str:
    """First 16 hexadecimal digits of SHA-256 over the content of items sorted by ``item_id``.

    Hashed: ids, semantic IDs, popularity, attributes (by name). Not hashed: codebook sizes, which belong to the model.

    Args:
        item_ids: the ids in ascending order.
        semantic_ids: int32 [items, levels], in the same order, as are the next two.
        popularity: float32 [items].
        attributes: columns with sorted values.
    """
    digest = hashlib.sha256(b"loka-catalog-content-1")
    _hash_strings(digest, item_ids)
    _hash_array(digest, semantic_ids)
    _hash_array(digest, popularity)
    for name in sorted(attributes):
        column = attributes[name]
        _hash_strings(digest, (name, column.kind, "single" if column.offsets is None else "list"))
        _hash_strings(digest, column.values)
        _hash_array(digest, column.codes)
        if column.offsets is not None:
            _hash_array(digest, column.offsets)
    return digest.hexdigest()[:VERSION_LENGTH]


def _hash_array(digest: Any, values: NDArray[Any]) -> None:
    """Shape and little-endian bytes."""
    digest.update(repr(values.shape).encode())
    digest.update(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).data)


def _hash_strings(digest: Any, strings: Sequence[str]) -> None:
    """Count, then lengths and UTF-8 bytes in chunks, so that no two sequences feed the same bytes."""
    digest.update(f"strings {len(strings)}".encode())
    for chunk in _chunks(strings):
        encoded = [text.encode("utf-8") for text in chunk]
        _hash_array(digest, np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
        digest.update(b"".join(encoded))


def _chunks(strings: Sequence[str]) -> Iterable[Sequence[str]]:
    return (strings[begin : begin + _CHUNK] for begin in range(0, len(strings), _CHUNK))
