"""The compiled catalog on disk: identity, and refusal of everything damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.readers import read_catalog
from loka_serve.catalog.storage import METADATA_KEY, is_compiled_catalog
from loka_serve.errors import CatalogError
from tests.catalog.strategies import Items, items

Arrays = dict[str, NDArray[Any]]


def assert_same(first: Catalog, second: Catalog) -> None:
    assert first.version == second.version
    assert first.item_ids == second.item_ids
    assert first.codebook_sizes == second.codebook_sizes
    pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
        *zip(first.trie.tokens, second.trie.tokens, strict=True),
        *zip(first.trie.child_offsets, second.trie.child_offsets, strict=True),
        (first.trie.item_offsets, second.trie.item_offsets),
        (first.leaf_of_item, second.leaf_of_item),
        (first.popularity, second.popularity),
    ]
    assert list(first.attributes) == list(second.attributes)
    for name, column in first.attributes.items():
        other = second.attributes[name]
        assert (column.values, column.kind) == (other.values, other.kind)
        pairs.append((column.codes, other.codes))
        assert (column.offsets is None) == (other.offsets is None)
        if column.offsets is not None and other.offsets is not None:
            pairs.append((column.offsets, other.offsets))
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items())
def test_load_gives_back_what_save_wrote(tmp_path: Path, drawn: Items) -> None:
    catalog = drawn.build()
    catalog.save(tmp_path / "catalog.safetensors")
    assert_same(Catalog.load(tmp_path / "catalog.safetensors"), catalog)


def test_equal_catalogs_give_equal_bytes(tmp_path: Path, groceries: Catalog) -> None:
    groceries.save(tmp_path / "one")
    Catalog.load(tmp_path / "one").save(str(tmp_path / "two"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]  # nothing partial is left


def test_failed_save_leaves_the_old_file(tmp_path: Path, groceries: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "catalog.safetensors"
    groceries.save(path)
    before = path.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("loka_serve.catalog.storage.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        groceries.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_real_catalog(tmp_path: Path, amazon_industrial: Path) -> None:
    catalog = read_catalog(amazon_industrial)
    catalog.save(tmp_path / "catalog.safetensors")
    assert_same(Catalog.load(tmp_path / "catalog.safetensors"), catalog)


def test_read_catalog_takes_a_compiled_catalog(tmp_path: Path, groceries: Catalog) -> None:
    path = tmp_path / "catalog.safetensors"
    groceries.save(path)
    assert is_compiled_catalog(path)
    assert_same(read_catalog(path), groceries)
    assert_same(read_catalog(path, codebook_sizes=[4, 4, 3], levels=3), groceries)
    with pytest.raises(CatalogError, match=r"expected codebook sizes \[8, 8, 8\], got \[4, 4, 3\]"):
        read_catalog(path, codebook_sizes=[8, 8, 8])
    with pytest.raises(CatalogError, match="expected 4 levels, got 3"):
        read_catalog(path, levels=4)


def damage_array(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Arrays, Any], None]:
    def apply(arrays: Arrays, _: Any) -> None:
        arrays[name] = change(arrays[name].copy())

    return apply


def damage_metadata(**changes: object) -> Callable[[Arrays, Any], None]:
    def apply(_: Arrays, metadata: Any) -> None:
        metadata.update(changes)

    return apply


def put(position: int, value: object) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        array[position] = value
        return array

    return change


# The attributes in order of name: 0 department, 1 organic, 2 price, 3 tags.
DAMAGE: dict[str, tuple[Callable[[Arrays, Any], object], str]] = {
    "an array missing": (lambda arrays, _: arrays.pop("tokens.1"), "tokens.1: missing array"),
    "wrong type": (
        damage_array("item_offsets", lambda array: array.astype(np.int32)),
        r"item_offsets: expected int64 \[6\], got int32",
    ),
    "wrong length": (
        damage_array("popularity", lambda array: array[:-1]),
        r"popularity: expected float32 \[7\], got float32 \[6\]",
    ),
    "two dimensions": (damage_array("tokens.0", lambda array: array[:, None]), r"tokens.0: expected int32 \[any\]"),
    "offsets not from 0": (
        damage_array("item_offsets", put(0, 1)),
        "item_offsets: expected strictly ascending offsets",
    ),
    "an empty leaf": (damage_array("item_offsets", put(1, 0)), "item_offsets: expected strictly ascending offsets"),
    "children beyond the level": (
        damage_array("child_offsets.1", put(3, 6)),
        "child_offsets.1: expected strictly ascending offsets from 0 to 5",
    ),
    "falling offsets": (
        damage_array("attributes.3.offsets", put(1, 5)),
        "attributes.3.offsets: expected ascending offsets from 0 to 8",
    ),
    "code beyond its codebook": (damage_array("tokens.2", put(1, 3)), r"tokens.2: expected .* all in 0\.\.2"),
    "negative code": (damage_array("tokens.0", put(0, -1)), r"tokens.0: expected .* all in 0\.\.3"),
    "siblings out of order": (
        damage_array("tokens.2", put(0, 2)),
        "tokens.2: expected ascending codes below each node",
    ),
    "a sibling twice": (damage_array("tokens.0", put(0, 2)), "tokens.0: expected ascending codes below each node"),
    "attribute code out of range": (
        damage_array("attributes.0.codes", put(0, 3)),
        r"attributes.0.codes: expected codes in -1\.\.2",
    ),
    "missing inside a list": (
        damage_array("attributes.3.codes", put(0, -1)),
        r"attributes.3.codes: expected codes in 0\.\.2",
    ),
    "values out of order": (
        damage_array("attributes.0.values.bytes", put(0, ord("z"))),
        "attributes.0.values: expected distinct values in ascending order",
    ),
    "text not UTF-8": (damage_array("item_ids.bytes", put(0, 0xFF)), "item_ids: expected UTF-8 text"),
    "an item id twice": (
        damage_array("item_ids.bytes", lambda _: np.frombuffer(b"soapoat milkcreambreadbunsoapgift card", np.uint8)),
        "item_ids: expected distinct ids",
    ),
    "changed popularity": (damage_array("popularity", put(0, 8)), "expected content of version cf8b58ec00736226, got"),
    "changed item id": (damage_array("item_ids.bytes", put(0, ord("s"))), "expected content of version"),
    "changed code": (damage_array("tokens.0", put(1, 3)), "expected content of version"),
    "other format": (damage_metadata(format="other"), "expected a compiled catalog"),
    "newer format": (damage_metadata(format_version=2), "expected format version 1, got 2"),
    "one level": (damage_metadata(codebook_sizes=[4]), "expected 2 to 5 levels, got 1"),
    "no sizes": (damage_metadata(codebook_sizes=None), "expected codebook_sizes, attributes and version"),
    "empty codebook": (damage_metadata(codebook_sizes=[4, 4, 0]), "codebook_sizes: expected sizes in 1"),
    "attribute without a kind": (
        damage_metadata(attributes=[{"name": "department", "kind": "color", "list": False}]),
        "attributes.0: expected a name, one of the kinds string, number, boolean",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(tmp_path: Path, groceries: Catalog, kind: str) -> None:
    damage, message = DAMAGE[kind]
    path = tmp_path / "catalog.safetensors"
    groceries.save(path)
    arrays = load_file(path)
    metadata = read_metadata(path)
    damage(arrays, metadata)
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, path, metadata={METADATA_KEY: json.dumps(metadata)})
    with pytest.raises(CatalogError, match=message) as caught:
        Catalog.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def read_metadata(path: Path) -> Any:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"][METADATA_KEY])


def test_not_a_compiled_catalog(tmp_path: Path, groceries: Catalog) -> None:
    path = tmp_path / "catalog.safetensors"
    with pytest.raises(CatalogError, match="no such file, expected a compiled catalog"):
        Catalog.load(path)
    assert not is_compiled_catalog(path)
    save_file({"weights": np.zeros(3)}, path)
    assert not is_compiled_catalog(path)
    with pytest.raises(CatalogError, match="expected a compiled catalog"):
        Catalog.load(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CatalogError, match="expected a safetensors file"):
        Catalog.load(path)
    groceries.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CatalogError, match="expected a safetensors file"):
        Catalog.load(path)
    with pytest.raises(CatalogError, match="expected a safetensors file"):
        Catalog.load(tmp_path)


def test_arrays_of_a_loaded_catalog_can_back_tensors(tmp_path: Path, groceries: Catalog) -> None:
    """torch warns about read-only memory; loaded and compiled arrays are alike in this."""
    groceries.save(tmp_path / "catalog.safetensors")
    loaded = Catalog.load(tmp_path / "catalog.safetensors")
    for catalog in (groceries, loaded):
        arrays: list[NDArray[Any]] = [*catalog.trie.tokens, *catalog.trie.child_offsets]
        assert all(array.flags.writeable for array in arrays)
