"""Streaming safetensors files: written and read one tensor at a time, never mapped and never whole in memory.

The safetensors library serialises a whole file in memory and reads through a memory map whose pages count as resident;
a build that must stay below twice the checkpoint's size can afford neither.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loka_serve.errors import BundleError

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ENTRY_BYTES = 160  # room for one tensor's header entry, its name not counted
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class TensorWriter:
    """Writes tensors into ``weights-{dtype}-{number}.safetensors``, one series of files for each dtype.

    One dtype a file keeps every tensor aligned without padding, which the format does not allow. Use as a context
    manager; leaving it normally completes the files.
    """

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._open: dict[torch.dtype, _Shard] = {}
        self.files: list[Path] = []

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; nothing of it stays in memory."""
        tensor = tensor.detach().cpu().contiguous()
        shard = self._open.get(tensor.dtype)
        if shard is None or not shard.fits(name, tensor.nbytes, self._max_shard_bytes):
            if shard is not None:
                shard.close()
            shard = self._new_shard(tensor.dtype)
        shard.append(name, tensor)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for shard in self._open.values():
            shard.close(complete=kind is None)

    def _new_shard(self, dtype: torch.dtype) -> _Shard:
        dtype_name = _DTYPE_NAMES[dtype]
        number = 1 + sum(path.name.startswith(f"weights-{dtype_name.lower()}-") for path in self.files)
        path = self._directory / f"weights-{dtype_name.lower()}-{number:05d}.safetensors"
        self.files.append(path)
        self._open[dtype] = _Shard(path, dtype_name)
        return self._open[dtype]


class _Shard:
    """One file being written: its header's room is reserved at the front and filled in at the end."""

    HEADER_BYTES = 1 << 16

    def __init__(self, path: Path, dtype_name: str) -> None:
        self._dtype_name = dtype_name
        self._entries: dict[str, object] = {}
        self._data_bytes = 0
        self._header_room = self.HEADER_BYTES
        self._file: BinaryIO = path.open("wb")
        self._file.seek(_LENGTH.size + self.HEADER_BYTES)

    def fits(self, name: str, size: int, max_bytes: int) -> bool:
        return self._data_bytes + size <= max_bytes and self._header_room >= _ENTRY_BYTES + len(name)

    def append(self, name: str, tensor: Tensor) -> None:
        end = self._data_bytes + tensor.nbytes
        self._entries[name] = {
            "dtype": self._dtype_name,
            "shape": list(tensor.shape),
            "data_offsets": [self._data_bytes, end],
        }
        self._header_room -= _ENTRY_BYTES + len(name)
        self._file.write(_bytes_of(tensor))
        self._data_bytes = end

    def close(self, complete: bool = True) -> None:
        with self._file:
            if complete:
                # The format allows trailing spaces in the header.
                header = json.dumps(self._entries, separators=(",", ":")).encode().ljust(self.HEADER_BYTES)
                assert len(header) == self.HEADER_BYTES
                self._file.seek(0)
                self._file.write(_LENGTH.pack(self.HEADER_BYTES) + header)


def read_tensor_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Each (name, tensor) of a safetensors file, in file order, into memory of its own on the CPU.

    Raises:
        BundleError: names the file, and the tensor if one is at fault.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            for name, dtype, shape, start, end in _read_header(path, file, size):
                tensor = torch.empty(shape, dtype=dtype)
                file.seek(start)
                if file.readinto(_bytes_of(tensor)) != end - start:
                    raise BundleError(f"{path}: tensor {name} ends beyond the file")
                yield name, tensor
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's bytes are: `bytes` of them from `offset` of `file`, row-major and little-endian."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Where each tensor of a safetensors file is, in file order. Raises BundleError as `read_tensor_file`."""
    try:
        with path.open("rb") as file:
            entries = _read_header(path, file, path.stat().st_size)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    return {name: TensorPlace(path, dtype, shape, start, end - start) for name, dtype, shape, start, end in entries}


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory."""
    array: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array.data


def _read_header(
    path: Path, file: BufferedReader, size: int
) -> list[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
    """(name, dtype, shape, first byte, last byte + 1) of every tensor, checked against the file's size."""
    prefix = file.read(_LENGTH.size)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
    if length > min(size - _LENGTH.size, MAX_HEADER_BYTES):
        raise BundleError(f"{path}: not a safetensors file: its header would be {length} bytes long")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = []
        data = _LENGTH.size + length
        for name, entry in header.items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(int(width) for width in entry["shape"])
            start, end = (data + int(offset) for offset in entry["data_offsets"])
            if min(shape, default=0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
                raise BundleError(
                    f"{path}: tensor {name}: {end - start} bytes do not hold {entry['dtype']} {list(shape)}"
                )
            tensors.append((name, dtype, shape, start, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path}: not a safetensors file of known dtypes: {error!r}") from error
    tensors.sort(key=lambda tensor: tensor[3])
    edges = [data, *(tensor[4] for tensor in tensors)]
    if any(tensor[3] != edge for tensor, edge in zip(tensors, edges, strict=False)) or edges[-1] != size:
        raise BundleError(f"{path}: tensors overlap, leave gaps or do not fill the file")
    return tensors
