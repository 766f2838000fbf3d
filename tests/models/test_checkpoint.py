"""Checkpoints: round trips whole and sharded, and an error that names the tensor for everything that does not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loka_serve.errors import CheckpointError
from loka_serve.models.checkpoint import INDEX_FILE, WEIGHTS_FILE, load_checkpoint, save_checkpoint
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2


@pytest.fixture(scope="module")
def model() -> OneRecV2:
    return OneRecV2(PRESETS["tiny"]).initialize(7).to(torch.bfloat16)


@pytest.fixture
def saved(model: OneRecV2, tmp_path: Path) -> Path:
    save_checkpoint(model, tmp_path)
    return tmp_path


@pytest.mark.parametrize("max_shard_bytes", [4 << 30, 100_000])
def test_round_trip(model: OneRecV2, tmp_path: Path, max_shard_bytes: int) -> None:
    save_checkpoint(model, tmp_path, max_shard_bytes)
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_bytes == 100_000)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == model.config
    expected = dict(model.named_parameters())
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, expected[name]), name
    assert next(load_checkpoint(tmp_path, dtype=torch.float32).parameters()).dtype == torch.float32


def rewrite(directory: Path, change: object) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, directory / WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("heads.1.weight"), "missing tensor heads.1.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unknown tensor extra"),
        (lambda tensors: tensors.update(bos=torch.zeros(3)), r"bos has shape \[3\]: expected \[64\]"),
        (lambda tensors: tensors.update(bos=torch.zeros(64, dtype=torch.int8)), "bos is I8: expected F32, BF16 or F16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(saved: Path, change: object, message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)


def put(name: str, value: float, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    """A change: one number of a tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[name].to(dtype)
        tensor.view(-1)[-1] = value
        tensors[name] = tensor

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "bos",
        "token_embeddings.0.weight",
        "norms.0.weight",
        "layers.1.moe.selection_bias",
        "layers.1.moe.down.weight",
        "heads.2.weight",
    ],
)
def test_a_number_that_is_not_finite_is_refused(saved: Path, name: str, value: float, dtype: torch.dtype) -> None:
    """Whatever the tensor is for: some are never seen by calibration."""
    rewrite(saved, put(name, value, dtype))
    with pytest.raises(CheckpointError, match=f"{WEIGHTS_FILE}: tensor {name} holds NaN, infinity"):
        load_checkpoint(saved)


def test_numbers_up_to_the_largest_of_bfloat16_are_accepted(saved: Path) -> None:
    largest = torch.finfo(torch.bfloat16).max
    rewrite(saved, put("bos", -largest, torch.float32))
    assert load_checkpoint(saved).bos[-1].item() == -largest
    rewrite(saved, put("bos", torch.finfo(torch.float32).max, torch.float32))  # would be infinite in a bundle
    with pytest.raises(CheckpointError, match="tensor bos holds .* expected finite numbers up to 3.39e"):
        load_checkpoint(saved)


def test_the_shard_of_a_number_that_is_not_finite_is_named(model: OneRecV2, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path, max_shard_bytes=100_000)
    shard = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]["norms.2.weight"]
    tensors = load_file(tmp_path / shard)
    put("norms.2.weight", math.nan, torch.float32)(tensors)
    save_file(tensors, tmp_path / shard)
    with pytest.raises(CheckpointError, match=f"{shard}: tensor norms.2.weight holds NaN"):
        load_checkpoint(tmp_path)


def test_json_that_nests_too_deeply_is_named(saved: Path) -> None:
    for file in ("config.json", INDEX_FILE):
        (saved / INDEX_FILE).unlink(missing_ok=True)
        content = (saved / file).read_bytes() if (saved / file).exists() else None
        (saved / file).write_text("[" * 100_000 + "]" * 100_000)
        with pytest.raises(CheckpointError, match=f"{file}: not readable as JSON: nested too deeply"):
            load_checkpoint(saved)
        if content is not None:
            (saved / file).write_bytes(content)


def test_broken_files_are_named(saved: Path, tmp_path: Path) -> None:
    weights = saved / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="model.safetensors: not a readable safetensors file"):
        load_checkpoint(saved)
    weights.unlink()
    with pytest.raises(CheckpointError, match="found neither"):
        load_checkpoint(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: not readable as JSON"):
        load_checkpoint(saved)
    with pytest.raises(CheckpointError, match="config.json: file not found"):
        load_checkpoint(tmp_path / "absent")


def test_an_index_that_lies_is_refused(model: OneRecV2, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path, max_shard_bytes=100_000)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    for change, message in (
        ({"bos": "../elsewhere.safetensors"}, "is not a file of"),
        ({"bos": "model-00099-of-00001.safetensors"}, "is not a file of"),
        ({"phantom": index["weight_map"]["bos"]}, "differ from"),
    ):
        changed = {**index, "weight_map": {**index["weight_map"], **change}}
        (tmp_path / INDEX_FILE).write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path)
