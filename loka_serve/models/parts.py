"""Projections that the model holds fused and a checkpoint may hold apart: q, k and v, and the SwiGLU's gate and up.

The model has no other form: attention reads one `qkv` site and SwiGLU one `gate_up` site, so that each is one GEMM and
its input is quantized once. Checkpoints that hold `query`, `key`, `value` or `gate`, `up` are fused in reading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from loka_serve.errors import CheckpointError

PARTS: dict[str, tuple[str, ...]] = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}
"""Last name of a fused site, and of its parts in the order of their rows."""

Shape = tuple[int, ...]


def parts_of(parameter: str) -> tuple[str, ...]:
    """`layers.0.mlp.gate_up.weight` -> (`layers.0.mlp.gate.weight`, `layers.0.mlp.up.weight`); () where none exist."""
    owner, _, leaf = parameter.rpartition(".")
    parent, _, site = owner.rpartition(".")
    return tuple(f"{parent}.{part}.{leaf}" for part in PARTS.get(site, ()))


def held_apart(expected: Collection[str], found: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Model parameters that are not among the stored names while one of their parts is, with all their parts."""
    return {
        name: parts
        for name in expected
        if (parts := parts_of(name)) and name not in found and not set(parts).isdisjoint(found)
    }


def part_shapes(expected: Mapping[str, Shape], apart: Mapping[str, tuple[str, ...]]) -> dict[str, Shape]:
    """What a checkpoint must hold: `expected` with every parameter of `apart` replaced by its parts."""
    shapes: dict[str, Shape] = {}
    for name, shape in expected.items():
        parts = apart.get(name, ())
        axis = _rows_axis(name, shape)
        for part in parts:
            shapes[part] = (*shape[:axis], shape[axis] // len(parts), *shape[axis + 1 :])
        if not parts:
            shapes[name] = shape
    return shapes


class PartsReader:
    """Puts parts together as they arrive; one whole tensor and one part of it are in memory at a time."""

    def __init__(self, expected: Mapping[str, Shape], apart: Mapping[str, tuple[str, ...]]) -> None:
        self._shapes = {name: expected[name] for name in apart}
        self._places = {part: (name, index) for name, parts in apart.items() for index, part in enumerate(parts)}
        self._missing = {name: len(parts) for name, parts in apart.items()}
        self._wholes: dict[str, Tensor] = {}

    def add(self, part: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Take a tensor; gives (name, tensor) of a parameter that is complete now. A tensor that is no part passes.

        Raises:
            CheckpointError: parts of one parameter have different dtypes.
        """
        if part not in self._places:
            return part, tensor
        name, index = self._places[part]
        if name not in self._wholes:
            self._wholes[name] = torch.empty(self._shapes[name], dtype=tensor.dtype, device=tensor.device)
        whole = self._wholes[name]
        if whole.dtype != tensor.dtype:
            raise CheckpointError(
                f"tensor {part} is {tensor.dtype}: expected {whole.dtype}, as the other parts of {name}"
            )
        axis = _rows_axis(name, self._shapes[name])
        rows = tensor.shape[axis]
        whole.narrow(axis, index * rows, rows).copy_(tensor)
        self._missing[name] -= 1
        return None if self._missing[name] else (name, self._wholes.pop(name))


def split_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The inverse of fusing: a parameter's parts by name, views of `tensor`; the parameter itself if it has none."""
    parts = parts_of(name)
    if not parts:
        return {name: tensor}
    return dict(zip(parts, tensor.chunk(len(parts), _rows_axis(name, tuple(tensor.shape))), strict=True))


def _rows_axis(name: str, shape: Shape) -> int:
    """Output channels: the first axis of a bias, the last but one of a weight ([out, in] or [groups, out, in])."""
    return len(shape) - (1 if name.endswith(".bias") else 2)
