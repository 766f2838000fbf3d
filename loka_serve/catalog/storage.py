"""A compiled catalog as one safetensors file: strings as UTF-8 bytes and offsets, everything checked on load."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from loka_serve.catalog.attributes import KINDS, AttributeColumn
from loka_serve.catalog.catalog import Catalog, leaf_of_items
from loka_serve.catalog.trie import Trie, check_codebook_sizes, check_levels
from loka_serve.catalog.version import content_version
from loka_serve.errors import CatalogError

FORMAT = "loka-catalog"
FORMAT_VERSION = 1
METADATA_KEY = "catalog"  # one key holding JSON: safetensors writes several keys in no fixed order

Array = NDArray[Any]


def save_catalog(catalog: Catalog, path: Path) -> None:
    """Write ``catalog`` to ``path``; equal catalogs give equal bytes. A crash leaves the old file or the new one."""
    trie = catalog.trie
    arrays: dict[str, Array] = {"item_offsets": trie.item_offsets, "popularity": catalog.popularity}
    arrays |= {f"tokens.{level}": tokens for level, tokens in enumerate(trie.tokens)}
    arrays |= {f"child_offsets.{level}": offsets for level, offsets in enumerate(trie.child_offsets)}
    arrays |= _pack_strings("item_ids", catalog.item_ids)
    described = []
    for position, (name, column) in enumerate(sorted(catalog.attributes.items())):
        described.append({"name": name, "kind": column.kind, "list": column.offsets is not None})
        arrays[f"attributes.{position}.codes"] = column.codes
        arrays |= _pack_strings(f"attributes.{position}.values", column.values)
        if column.offsets is not None:
            arrays[f"attributes.{position}.offsets"] = column.offsets
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": catalog.version,
        "codebook_sizes": list(trie.codebook_sizes),
        "attributes": described,
    }
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(contiguous, partial, metadata={METADATA_KEY: json.dumps(metadata)})
        os.chmod(partial, 0o644)  # mkstemp makes it readable by its owner alone
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def is_compiled_catalog(path: Path) -> bool:
    """Whether a safetensors file says that it is a compiled catalog (it may still be a damaged one)."""
    try:
        with safe_open(path, framework="numpy") as file:
            return METADATA_KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def load_catalog(path: Path) -> Catalog:
    """Read and check a compiled catalog; every error names ``path`` and what was expected."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise CatalogError(f"{path}: no such file, expected a compiled catalog") from None
    except (SafetensorError, OSError) as error:
        raise CatalogError(f"{path}: expected a safetensors file, got: {error}") from None
    return _Loader(path, metadata, arrays).catalog()


class _Loader:
    """Turns the arrays of one file into a catalog, checking each against the others."""

    def __init__(self, path: Path, metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> None:
        self._path = path
        self._arrays = arrays
        try:
            described = json.loads(metadata.get(METADATA_KEY, ""))
            if not isinstance(described, dict) or described.get("format") != FORMAT:
                raise ValueError
        except ValueError:
            self._fail(f"expected a compiled catalog (metadata {METADATA_KEY!r} of format {FORMAT!r})")
        if described.get("format_version") != FORMAT_VERSION:
            self._fail(f"expected format version {FORMAT_VERSION}, got {described.get('format_version')}")
        self._described: dict[str, Any] = described

    def catalog(self) -> Catalog:
        """The catalog of the file, checked."""
        try:
            sizes = [int(size) for size in self._described["codebook_sizes"]]
            described = [(entry["name"], entry["kind"], entry["list"]) for entry in self._described["attributes"]]
            version = str(self._described["version"])
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"expected codebook_sizes, attributes and version in the metadata, got: {error!r}")
        try:
            check_codebook_sizes(sizes, check_levels(len(sizes)))
        except CatalogError as error:
            self._fail(str(error))
        trie = self._trie(tuple(sizes))
        items = trie.item_count
        item_ids = self._strings("item_ids", items)
        popularity = self._array("popularity", np.float32, items)
        attributes = {
            name: self._attribute(position, name, kind, is_list, items)
            for position, (name, kind, is_list) in enumerate(described)
        }
        catalog = Catalog(trie, item_ids, leaf_of_items(trie), popularity, attributes, version)
        self._check_content(catalog)
        return catalog

    def _check_content(self, catalog: Catalog) -> None:
        """Distinct ids, and the content that the version names: no damage inside an array goes unnoticed."""
        by_id = np.array(sorted(range(catalog.item_count), key=catalog.item_ids.__getitem__), dtype=np.int64)
        item_ids = [catalog.item_ids[index] for index in by_id.tolist()]
        if any(earlier == later for earlier, later in zip(item_ids, item_ids[1:], strict=False)):
            self._fail("item_ids: expected distinct ids")
        attributes = {name: column.take(by_id) for name, column in catalog.attributes.items()}
        version = content_version(item_ids, catalog.semantic_ids(by_id), catalog.popularity[by_id], attributes)
        if version != catalog.version:
            self._fail(f"expected content of version {catalog.version}, got {version}")

    def _trie(self, sizes: tuple[int, ...]) -> Trie:
        levels = len(sizes)
        tokens = [self._array(f"tokens.{level}", np.int32) for level in range(levels)]
        child_offsets = [
            self._offsets(f"child_offsets.{level}", len(tokens[level]), len(tokens[level + 1]))
            for level in range(levels - 1)
        ]
        item_offsets = self._offsets("item_offsets", len(tokens[-1]), None)
        for level, (codes, size) in enumerate(zip(tokens, sizes, strict=True)):
            if len(codes) == 0 or codes.min() < 0 or codes.max() >= size:
                self._fail(f"tokens.{level}: expected at least one code, all in 0..{size - 1}")
            ascending = np.diff(codes) > 0
            if level > 0:
                ascending[child_offsets[level - 1][1:-1] - 1] = True  # the first child of the next node may be smaller
            if not ascending.all():
                self._fail(f"tokens.{level}: expected ascending codes below each node")
        return Trie(sizes, tuple(tokens), tuple(child_offsets), item_offsets)

    def _attribute(self, position: int, name: str, kind: str, is_list: bool, items: int) -> AttributeColumn:
        prefix = f"attributes.{position}"
        if not isinstance(name, str) or kind not in KINDS or not isinstance(is_list, bool):
            self._fail(f"{prefix}: expected a name, one of the kinds {', '.join(KINDS)} and whether it holds lists")
        values = self._strings(f"{prefix}.values", None)
        if any(earlier >= later for earlier, later in zip(values, values[1:], strict=False)):
            self._fail(f"{prefix}.values: expected distinct values in ascending order")
        codes = self._array(f"{prefix}.codes", np.int32, None if is_list else items)
        offsets = self._offsets(f"{prefix}.offsets", items, len(codes), strictly=False) if is_list else None
        lowest = 0 if is_list else -1
        if len(codes) and (codes.min() < lowest or codes.max() >= len(values)):
            self._fail(f"{prefix}.codes: expected codes in {lowest}..{len(values) - 1}")
        return AttributeColumn(tuple(values), codes, offsets, kind)

    def _array(self, name: str, dtype: type[np.generic], length: int | None = None) -> Array:
        array = self._arrays.get(name)
        if array is None:
            self._fail(f"{name}: missing array")
        if array.dtype != dtype or array.ndim != 1 or (length is not None and len(array) != length):
            expected = f"{np.dtype(dtype)} [{'any' if length is None else length}]"
            self._fail(f"{name}: expected {expected}, got {array.dtype} {list(array.shape)}")
        return array

    def _offsets(self, name: str, count: int, end: int | None, strictly: bool = True) -> NDArray[np.int64]:
        """Offsets of ``count`` segments (not empty if ``strictly``) that end at ``end``, if that is known."""
        offsets = self._array(name, np.int64, count + 1)
        steps = np.diff(offsets)
        if offsets[0] != 0 or (steps < (1 if strictly else 0)).any() or (end is not None and offsets[-1] != end):
            ascending = "strictly ascending" if strictly else "ascending"
            self._fail(f"{name}: expected {ascending} offsets from 0" + ("" if end is None else f" to {end}"))
        return offsets

    def _strings(self, name: str, count: int | None) -> list[str]:
        if count is None:
            count = max(len(self._array(f"{name}.offsets", np.int64)) - 1, 0)
        data = self._array(f"{name}.bytes", np.uint8)
        offsets = self._offsets(f"{name}.offsets", count, len(data), strictly=False).tolist()
        blob = data.tobytes()
        try:
            return [blob[begin:end].decode("utf-8") for begin, end in zip(offsets, offsets[1:], strict=False)]
        except UnicodeDecodeError as error:
            self._fail(f"{name}: expected UTF-8 text, got: {error}")

    def _fail(self, message: str) -> NoReturn:
        raise CatalogError(f"{self._path}: {message}")


def _pack_strings(name: str, strings: Sequence[str]) -> dict[str, Array]:
    """``<name>.bytes`` uint8, the texts in UTF-8 one after the other, and ``<name>.offsets`` int64 [texts + 1]."""
    encoded = [text.encode("utf-8") for text in strings]
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    return {
        f"{name}.bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        f"{name}.offsets": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64, copy=False),
    }
