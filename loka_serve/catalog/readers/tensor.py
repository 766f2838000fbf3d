"""Reader of bare code tensors [levels, items], as GRID and NVIDIA's recommenders keep them: .npy, .safetensors, .pt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from loka_serve.catalog.readers.base import Source
from loka_serve.catalog.table import ItemTable, ItemTableBuilder
from loka_serve.catalog.trie import MAX_LEVELS, MIN_LEVELS
from loka_serve.errors import CatalogError

T = TypeVar("T")


class TensorReader:
    """Column ``i`` holds the codes of the item whose id is the text of ``i``; no popularity, no attributes."""

    name = "tensor [levels, items] (.npy, .safetensors, .pt)"

    def matches(self, source: Source) -> bool:
        """By extension."""
        return source.suffix in (".npy", ".safetensors", ".pt", ".pth")

    def read(self, path: Path, codebook_sizes: Sequence[int] | None, levels: int | None) -> ItemTable:
        """See :class:`CatalogReader`; places are columns, from 0."""
        load = {".npy": _load_npy, ".safetensors": _load_safetensors}.get(path.suffix.lower(), _load_torch)
        codes = load(path)
        shape = list(codes.shape)
        if not np.issubdtype(codes.dtype, np.integer) or codes.ndim != 2:
            raise CatalogError(f"{path}: expected an integer tensor [levels, items], got {codes.dtype} {shape}")
        if not MIN_LEVELS <= shape[0] <= MAX_LEVELS:
            hint = "; is it transposed?" if MIN_LEVELS <= shape[1] <= MAX_LEVELS else ""
            expected = f"[levels, items] with {MIN_LEVELS}..{MAX_LEVELS} levels"
            raise CatalogError(f"{path}: expected {expected}, got {shape}{hint}")
        builder = ItemTableBuilder(path, "column", levels, codebook_sizes)
        for column, item_codes in enumerate(codes.T.tolist()):
            builder.add(column, column, item_codes)
        return builder.finish()


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except Exception as error:  # damaged headers raise whatever the parser stumbles over
        raise CatalogError(f"{path}: expected a NumPy array file, got: {error}") from None
    if not isinstance(loaded, np.ndarray):
        raise CatalogError(f"{path}: expected a NumPy array file, got an archive of arrays")
    return loaded


def _load_safetensors(path: Path) -> NDArray[Any]:
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, TypeError, KeyError) as error:  # the last two: types that NumPy does not have
        raise CatalogError(f"{path}: expected a safetensors file of integers, got: {error}") from None
    return _only_one(path, arrays)


def _load_torch(path: Path) -> NDArray[Any]:
    """The one place that needs torch; ``weights_only`` keeps the file from running code."""
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise whatever the unpickler stumbles over
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CatalogError(f"{path}: expected a tensor saved by torch, got: {reason}") from None
    named = loaded.items() if isinstance(loaded, dict) else [("tensor", loaded)]
    tensors = {str(name): value for name, value in named if isinstance(value, torch.Tensor)}
    tensor = _only_one(path, tensors)
    if tensor.is_floating_point() or tensor.is_complex():
        raise CatalogError(f"{path}: expected an integer tensor [levels, items], got {tensor.dtype}")
    array: NDArray[Any] = tensor.numpy()
    return array


def _only_one(path: Path, arrays: dict[str, T]) -> T:
    if len(arrays) != 1:
        raise CatalogError(f"{path}: expected exactly one tensor, got {len(arrays)}: {', '.join(sorted(arrays))}")
    return next(iter(arrays.values()))
