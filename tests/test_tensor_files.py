"""Streaming safetensors files: what the safetensors library reads, and what we read back."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka_serve.errors import BundleError
from loka_serve.tensor_files import TensorWriter, read_tensor_file


def tensors() -> dict[str, Tensor]:
    values = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    return {
        "codes": values.to(torch.float8_e4m3fn),
        "scale": values[:, 0].contiguous(),
        "half": values.bfloat16(),
        "bytes": torch.arange(-3, 4, dtype=torch.int8),
        "scalar": torch.tensor(2.5),
        "transposed": values.T,
        "none": torch.empty(0, 5),
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype
        and tensor.shape == expected[name].shape
        and torch.equal(tensor.float(), expected[name].float())
        for name, tensor in found.items()
    )


def write(folder: Path, max_shard_bytes: int = 1 << 30) -> list[Path]:
    with TensorWriter(folder, max_shard_bytes) as writer:
        for name, tensor in tensors().items():
            writer.write(name, tensor)
    return writer.files


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    found: dict[str, Tensor] = {}
    for path in write(tmp_path):
        found |= load_file(path)
    assert same(found, tensors())


def test_round_trip(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert [path.name for path in files] == [
        f"weights-{dtype}-00001.safetensors" for dtype in ("f8_e4m3", "f32", "bf16", "i8")
    ]
    assert same(dict(entry for path in files for entry in read_tensor_file(path)), tensors())


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(contiguous, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    assert same(dict(read_tensor_file(tmp_path / "weights.safetensors")), tensors())


def test_shards_stay_below_the_limit(tmp_path: Path) -> None:
    with TensorWriter(tmp_path, max_shard_bytes=1000) as writer:
        for index in range(10):
            writer.write(f"t{index}", torch.full((100,), float(index)))
        writer.write("large", torch.ones(1000))  # a tensor is never divided
    assert len(writer.files) == 6  # two of 400 bytes a shard, and the large one
    found = dict(entry for path in writer.files for entry in read_tensor_file(path))
    assert len(found) == 11 and all((found[f"t{index}"] == index).all() for index in range(10))


def test_more_tensors_than_one_header_holds(tmp_path: Path) -> None:
    with TensorWriter(tmp_path, max_shard_bytes=1 << 30) as writer:
        for index in range(1000):
            writer.write(f"layers.{index}.some.long.name.of.a.site.weight_scale", torch.tensor([float(index)]))
    assert len(writer.files) > 1
    assert len(dict(entry for path in writer.files for entry in load_file(path).items())) == 1000


def test_an_interrupted_file_is_not_readable(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path, 1 << 30)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.write("t", torch.ones(4))
        raise KeyboardInterrupt
    with pytest.raises(BundleError, match=r"weights-f32-00001.safetensors: not a safetensors file"):
        list(read_tensor_file(writer.files[0]))


def file_of(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), start: int = 0, end: int = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"{", b"", None, "not a safetensors file"),
        (b"[]", b"", None, "not a safetensors file"),
        ({"t": entry()}, b"\0" * 8, 1 << 40, "its header would be"),
        ({"t": entry("F64")}, b"\0" * 8, None, "known dtypes"),
        ({"t": entry(shape=(3,))}, b"\0" * 8, None, "tensor t: 8 bytes do not hold F32"),
        ({"t": entry(shape=(-1, -2))}, b"\0" * 8, None, "tensor t"),
        ({"t": entry()}, b"\0" * 7, None, "do not fill the file"),
        ({"t": entry()}, b"\0" * 9, None, "do not fill the file"),
        ({"t": entry(), "u": entry(start=4, end=12)}, b"\0" * 12, None, "overlap"),
        ({"t": entry(start=4, end=12)}, b"\0" * 12, None, "leave gaps"),
    ],
)
def test_malformed_files_are_refused(
    tmp_path: Path, header: object, data: bytes, length: int | None, message: str
) -> None:
    path = file_of(tmp_path / "weights.safetensors", header, data, length)
    with pytest.raises(BundleError, match=message) as caught:
        list(read_tensor_file(path))
    assert str(path) in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        list(read_tensor_file(tmp_path / "nothing.safetensors"))
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(BundleError, match="not a safetensors file"):
        list(read_tensor_file(tmp_path / "empty.safetensors"))
