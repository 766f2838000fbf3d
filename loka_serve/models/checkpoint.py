"""Checkpoints: a directory with `config.json` and `model.safetensors`, or shards with a Hugging Face style index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loka_serve.errors import CheckpointError
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.models.parts import PartsReader, held_apart, part_shapes

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LARGEST_NUMBER = torch.finfo(torch.bfloat16).max
"""Of a stored number: bundles keep weights in bfloat16 or less, where a larger float32 would become infinite."""


def load_config(directory: str | Path) -> OneRecV2Config:
    """Read `config.json` of a checkpoint or bundle. Raises CheckpointError naming the file."""
    path = Path(directory) / CONFIG_FILE
    values = _read_json(path)
    try:
        return OneRecV2Config.from_dict(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_checkpoint(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> OneRecV2:
    """Read a model whole, or not at all. Projections that are held apart are fused, see `loka_serve.models.parts`.

    Args:
        dtype: convert floating-point weights to it; None keeps the stored ones.

    Raises:
        CheckpointError: names the file and the tensor that is missing, extra, misshapen or not finite.
    """
    config = load_config(directory)
    with torch.device("meta"):
        model = OneRecV2(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    apart = held_apart(expected, stored_names(directory))
    check_tensors(Path(directory), part_shapes(expected, apart))
    reader = PartsReader(expected, apart)
    for name, tensor in read_tensors(directory):
        complete = reader.add(name, tensor.to(device=device, dtype=dtype or tensor.dtype))
        if complete is not None:
            assign_parameter(model, *complete)
    return model.eval()


def stored_names(directory: str | Path) -> set[str]:
    """Names of all tensors of a checkpoint, from the files' headers. Raises CheckpointError naming the file."""
    names: set[str] = set()
    for path in _weight_files(Path(directory)):
        with _open(path) as file:
            names |= set(file.keys())
    return names


def save_checkpoint(model: OneRecV2, directory: str | Path, max_shard_bytes: int = 4 << 30) -> None:
    """Write `config.json` and the weights, sharded with an index when they exceed `max_shard_bytes`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, parameter in model.named_parameters():
        if parameter.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = parameter.detach().contiguous().cpu()
        room -= parameter.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / WEIGHTS_FILE, metadata={"format": "pt"})
        return
    weight_map = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index_json, indent=2) + "\n")


def read_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Stream (name, tensor) of a checkpoint, one tensor in memory at a time.

    Raises:
        CheckpointError: names the file and the tensor that holds NaN, infinity, or a number that bfloat16 has not.
    """
    for path in _weight_files(Path(directory)):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_tensor(name)
                _check_finite(path, name, tensor)
                yield name, tensor


def check_tensors(directory: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Compare the stored names, shapes and dtypes with `expected` without reading the data."""
    found: dict[str, Path] = {}
    for path in _weight_files(directory):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise CheckpointError(f"{path}: tensor {name} is also in {found[name].name}: expected it once")
                found[name] = path
                if name not in expected:
                    continue
                piece = file.get_slice(name)
                if tuple(piece.get_shape()) != expected[name]:
                    raise CheckpointError(
                        f"{path}: tensor {name} has shape {list(piece.get_shape())}: expected {list(expected[name])}"
                    )
                if piece.get_dtype() not in ("F32", "BF16", "F16"):
                    raise CheckpointError(f"{path}: tensor {name} is {piece.get_dtype()}: expected F32, BF16 or F16")
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected))
    if missing:
        raise CheckpointError(f"{directory}: missing tensor {_some(missing)}: expected by {CONFIG_FILE}")
    if extra:
        raise CheckpointError(f"{found[extra[0]]}: unknown tensor {_some(extra)}: not part of the configured model")


def assign_parameter(model: OneRecV2, name: str, tensor: Tensor) -> None:
    """Give the model's parameter `name` the storage of `tensor`, replacing a meta tensor or an earlier value."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=False))


def _weight_files(directory: Path) -> list[Path]:
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        path = directory / WEIGHTS_FILE
        if not path.exists():
            raise CheckpointError(f"{directory}: expected {WEIGHTS_FILE} or {INDEX_FILE}, found neither")
        return [path]
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f'{index_path}: expected an object "weight_map" of tensor name to file name')
    paths = []
    for file in sorted(set(weight_map.values())):
        path = directory / file
        if Path(file).name != file or not path.exists():
            raise CheckpointError(f"{index_path}: shard {file!r} is not a file of {directory}")
        paths.append(path)
    for path in paths:
        with _open(path) as shard:
            present = set(shard.keys())
        promised = {name for name, file in weight_map.items() if file == path.name}
        if present != promised:
            raise CheckpointError(
                f"{path}: holds tensors that differ from {INDEX_FILE}, first {sorted(present ^ promised)[0]}"
            )
    return paths


def _check_finite(path: Path, name: str, tensor: Tensor) -> None:
    # NaN passes through aminmax; unlike isfinite().all() it makes no mask of the tensor's size.
    if tensor.numel() and not all(abs(bound.item()) <= LARGEST_NUMBER for bound in torch.aminmax(tensor)):
        raise CheckpointError(
            f"{path}: tensor {name} holds NaN, infinity or a number beyond bfloat16: "
            f"expected finite numbers up to {LARGEST_NUMBER:.3g}"
        )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file not found") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path}: not readable as JSON: nested too deeply") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
