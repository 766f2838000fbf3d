"""Which reader reads what, and that the format does not matter to the result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loka_serve.catalog.readers import READERS, read_catalog
from loka_serve.catalog.readers.openonerec import pack_semantic_id
from loka_serve.errors import CatalogError

SEMANTIC_IDS = [[3, 1, 0], [0, 2, 5], [0, 2, 5], [0, 2, 4]]


def test_same_items_in_every_format_give_the_same_version(tmp_path: Path) -> None:
    paths = {suffix: tmp_path / f"items.{suffix}" for suffix in ("jsonl", "json", "index.json", "npy")}
    rows = [{"item_id": str(item), "semantic_id": codes} for item, codes in enumerate(SEMANTIC_IDS)]
    paths["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    packed: dict[str, list[dict[str, int]]] = {}
    for item, codes in enumerate(SEMANTIC_IDS):
        packed.setdefault(str(pack_semantic_id(codes)), []).append({"pid": item})
    paths["json"].write_text(json.dumps(packed))
    tokens = {
        str(item): [f"<{letter}_{code}>" for letter, code in zip("abc", codes, strict=True)]
        for item, codes in enumerate(SEMANTIC_IDS)
    }
    paths["index.json"].write_text(json.dumps(tokens, indent=2))
    np.save(paths["npy"], np.array(SEMANTIC_IDS).T)
    catalogs = [read_catalog(path) for path in paths.values()]
    assert {tuple(catalog.item_ids) for catalog in catalogs} == {("3", "1", "2", "0")}
    assert len({catalog.version for catalog in catalogs}) == 1


def test_unknown_formats(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("item_id,semantic_id\n")
    with pytest.raises(CatalogError, match="not a known item file; expected one of: ") as caught:
        read_catalog(path)
    assert all(reader.name in str(caught.value) for reader in READERS)
    with pytest.raises(CatalogError, match="nothing.jsonl: no such file or directory"):
        read_catalog(tmp_path / "nothing.jsonl")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(CatalogError, match="list.json: not a known item file"):
        read_catalog(tmp_path / "list.json")
