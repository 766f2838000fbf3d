"""Checkpoints that hold q, k, v or gate, up apart: fused while they are read, bit for bit the model that was split."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loka_serve.errors import CheckpointError
from loka_serve.models.checkpoint import WEIGHTS_FILE, load_checkpoint, save_checkpoint
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.models.parts import held_apart, parts_of, split_parts

CONFIG = dataclasses.replace(PRESETS["tiny"], codebook_sizes=(8, 8, 8), linear_bias=True)


@pytest.fixture
def model() -> OneRecV2:
    model = OneRecV2(CONFIG).initialize(5)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model.bfloat16()


def write_apart(model: OneRecV2, directory: Path) -> dict[str, torch.Tensor]:
    save_checkpoint(model, directory)
    tensors = {
        part: tensor.contiguous()
        for name, whole in load_file(directory / WEIGHTS_FILE).items()
        for part, tensor in split_parts(name, whole).items()
    }
    save_file(tensors, directory / WEIGHTS_FILE)
    return tensors


def test_a_split_checkpoint_reads_as_the_same_model(model: OneRecV2, tmp_path: Path) -> None:
    tensors = write_apart(model, tmp_path)
    assert tensors["layers.0.self_attention.key.weight"].shape == (64, 64)
    assert tensors["layers.0.self_attention.key.bias"].shape == (64,)
    assert tensors["layers.1.moe.up.weight"].shape == (8, 64, 64)
    assert not any(".qkv." in name or ".gate_up." in name for name in tensors)
    found = dict(load_checkpoint(tmp_path).named_parameters())
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_only_some_sites_may_be_apart(model: OneRecV2, tmp_path: Path) -> None:
    tensors = write_apart(model, tmp_path)
    gate, up = (tensors.pop(f"layers.1.moe.{part}.weight") for part in ("gate", "up"))
    whole = torch.cat([gate, up], 1)
    save_file({**tensors, "layers.1.moe.gate_up.weight": whole}, tmp_path / WEIGHTS_FILE)
    assert torch.equal(load_checkpoint(tmp_path).layers[1].moe.gate_up.weight, whole)


def test_parts_that_do_not_fit_are_named(model: OneRecV2, tmp_path: Path) -> None:
    tensors = write_apart(model, tmp_path)

    def error(**change: torch.Tensor | None) -> str:
        changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(changed, tmp_path / WEIGHTS_FILE)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path)
        return str(caught.value)

    value = "layers.0.self_attention.value.weight"
    assert f"missing tensor {value}" in error(**{value: None})
    assert f"tensor {value} has shape [32, 64]: expected [64, 64]" in error(**{value: tensors[value][:32].contiguous()})
    message = error(**{value: tensors[value].float()})
    assert f"tensor {value} is torch.float32: expected torch.bfloat16, as the other parts" in message
    extra = {"layers.0.self_attention.qkv.weight": torch.zeros(192, 64, dtype=torch.bfloat16)}
    assert "unknown tensor layers.0.self_attention." in error(**extra)  # both forms at once


def test_names() -> None:
    assert parts_of("layers.0.mlp.gate_up.weight") == ("layers.0.mlp.gate.weight", "layers.0.mlp.up.weight")
    assert parts_of("layers.0.mlp.down.weight") == parts_of("bos") == ()
    assert held_apart(
        ["a.gate_up.weight", "b.gate_up.weight", "c.down.weight"], {"a.gate.weight", "b.gate_up.weight"}
    ) == {"a.gate_up.weight": ("a.gate.weight", "a.up.weight")}
