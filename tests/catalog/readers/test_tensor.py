"""Bare code tensors [levels, items]: NumPy, safetensors and torch files."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from loka_serve.catalog.readers import read_catalog
from loka_serve.errors import CatalogError

CODES = np.array([[3, 0, 0], [1, 2, 2], [0, 5, 4]], dtype=np.int64)  # 3 levels, 3 items


def as_npy(path: Path) -> Path:
    np.save(path / "codes.npy", CODES.astype(np.int16))
    return path / "codes.npy"


def as_safetensors(path: Path) -> Path:
    save_file({"semantic_ids": CODES.astype(np.int32)}, path / "codes.safetensors")
    return path / "codes.safetensors"


def as_torch(path: Path) -> Path:
    torch.save(torch.from_numpy(CODES), path / "codes.pt")
    return path / "codes.pt"


def as_torch_dictionary(path: Path) -> Path:
    torch.save({"sids": torch.from_numpy(CODES), "levels": 3}, path / "codes.pth")
    return path / "codes.pth"


@pytest.mark.parametrize("write", [as_npy, as_safetensors, as_torch, as_torch_dictionary])
def test_formats(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    catalog = read_catalog(write(tmp_path))
    assert catalog.trie.semantic_ids().tolist() == [[0, 2, 4], [0, 2, 5], [3, 1, 0]]
    assert catalog.item_ids == ["2", "1", "0"]
    assert catalog.codebook_sizes == (4, 3, 6)
    assert catalog.attributes == {}


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (CODES.astype(np.float32), "expected an integer tensor .*, got float32"),
        (CODES[0], r"expected an integer tensor \[levels, items\], got int64 \[3\]"),
        (np.zeros((100, 3), np.int64), r"2\.\.5 levels, got \[100, 3\]; is it transposed\?"),
        (np.zeros((1, 9), np.int64), r"2\.\.5 levels, got \[1, 9\]$"),
        (np.array([[0, 1], [2, -1]]), "column 1: semantic_id: level 1 has code -1"),
        (np.zeros((3, 0), np.int64), "expected at least one item"),
    ],
)
def test_bad_tensors(tmp_path: Path, codes: NDArray[Any], message: str) -> None:
    path = tmp_path / "codes.npy"
    np.save(path, codes)
    with pytest.raises(CatalogError, match=message) as caught:
        read_catalog(path)
    assert str(caught.value).startswith(str(path))


def test_codebook_size(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="column 1: semantic_id: level 2 has code 5, expected less than .* size 5"):
        read_catalog(as_npy(tmp_path), codebook_sizes=[8, 8, 5])


@pytest.mark.parametrize("name", ["codes.npy", "codes.safetensors", "codes.pt"])
@pytest.mark.parametrize("content", [b"garbage, not a tensor", b"PK\x03\x04", b"\x80\x02garbage"])
def test_not_a_tensor_file(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CatalogError, match="expected a"):
        read_catalog(path)


@pytest.mark.parametrize("write", [as_npy, as_safetensors, as_torch])
def test_truncated_file(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CatalogError, match=f"{path.name}: expected a"):
        read_catalog(path)


class Exploit:
    """Pickles to a call; loading it must not make the call."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("name", ["codes.pt", "codes.npy"])
def test_no_code_of_a_file_is_run(tmp_path: Path, name: str) -> None:
    path, target = tmp_path / name, tmp_path / "touched"
    if name == "codes.pt":
        torch.save(Exploit(target), path)
    else:
        path.write_bytes(pickle.dumps(Exploit(target)))
    with pytest.raises(CatalogError, match=f"{name}: expected a"):
        read_catalog(path)
    assert not target.exists()


def test_more_or_fewer_tensors_than_one(tmp_path: Path) -> None:
    path = tmp_path / "codes.safetensors"
    save_file({"a": CODES, "b": CODES}, path)
    with pytest.raises(CatalogError, match="expected exactly one tensor, got 2: a, b"):
        read_catalog(path)
    torch.save([1, 2], tmp_path / "codes.pt")
    with pytest.raises(CatalogError, match="expected exactly one tensor, got 0"):
        read_catalog(tmp_path / "codes.pt")


def test_types_that_numpy_does_not_have(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(CODES).bfloat16(), tmp_path / "codes.pt")
    with pytest.raises(CatalogError, match="expected an integer tensor .*, got torch.bfloat16"):
        read_catalog(tmp_path / "codes.pt")


def test_archive_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "codes.npz", codes=CODES)
    path = (tmp_path / "codes.npz").rename(tmp_path / "codes.npy")
    with pytest.raises(CatalogError, match="expected a NumPy array file, got an archive of arrays"):
        read_catalog(path)
