"""Entries of a dispatch table, and how they are read back from JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .linear.implementations import IMPLEMENTATIONS, MEASURED_RECIPES

OUT_DTYPES = {"linear": torch.bfloat16, "linear_float32": torch.float32}
"""The dense operations that are measured, and what they give."""
EXPERTS = "experts"
"""Both grouped GEMMs of a mixture of experts, which share the blocks that rows are sorted into."""
OPERATIONS = (*OUT_DTYPES, EXPERTS)


@dataclass(frozen=True, order=True)
class Shape:
    """One entry's key: an operation in a recipe, weight [n, k], at so many rows.

    Attributes:
        groups, slots, shared: of `EXPERTS`, whose n is an expert's width, k the model's, and rows the tokens: how many
            experts there are, how many of them compute a token, and how many of these compute every token.
    """

    op: str
    recipe: str
    n: int
    k: int
    rows: int
    groups: int = 1
    slots: int = 1
    shared: int = 0

    def in_recipe(self, recipe: str) -> Shape:
        """The same work in another recipe."""
        return dataclasses.replace(self, recipe=recipe)


@dataclass(frozen=True)
class Entry:
    """What was measured at a shape.

    Attributes:
        us: microseconds of each implementation that agrees with the reference, fastest first.
        bf16_us: of the fastest BF16 implementation at that shape; None where none ran.
        mere: floored MERE of each implementation's output on Gaussian operands, where it was measured.
    """

    us: Mapping[str, float]
    bf16_us: float | None
    mere: Mapping[str, float] = field(default_factory=dict)


Parsed = tuple[dict[Shape, Entry], dict[str, str], dict[tuple[str, int, int, int], str]]


def parse(saved: Mapping[str, Any]) -> Parsed:
    """Entries, libraries and names of sites of a saved table.

    Raises:
        ValueError: names the place that is not as expected; or KeyError, TypeError or AttributeError from parts that
            are missing or of another form.
    """
    if not isinstance(saved["entries"], list):
        raise ValueError(f"entries: expected a list, got {saved['entries']!r}")
    entries = dict(_entry(f"entries[{index}]", entry) for index, entry in enumerate(saved["entries"]))
    libraries = {str(name): str(version) for name, version in saved.get("libraries", {}).items()}
    sites = {(it["op"], it["n"], it["k"], it["groups"]): str(it["site"]) for it in saved.get("sites", [])}
    return entries, libraries, sites


def _entry(where: str, entry: Any) -> tuple[Shape, Entry]:
    shape, us, bf16_us, mere = Shape(**entry["shape"]), entry["us"], entry["bf16_us"], entry.get("mere", {})
    _check_word(f"{where}.shape.op", shape.op, OPERATIONS)
    _check_word(f"{where}.shape.recipe", shape.recipe, MEASURED_RECIPES)
    for name, least in (("n", 1), ("k", 1), ("rows", 1), ("groups", 1), ("slots", 1), ("shared", 0)):
        size = getattr(shape, name)
        if type(size) is not int or size < least:
            raise ValueError(f"{where}.shape.{name}: expected a whole number from {least}, got {size!r}")
    if not isinstance(us, dict) or not us:
        raise ValueError(f"{where}.us: expected microseconds by implementation, got {us!r}")
    if not isinstance(mere, dict) or not set(mere) <= set(us):
        raise ValueError(f"{where}.mere: expected errors by implementation of us, got {mere!r}")
    for name, value in us.items():
        if shape.op != EXPERTS:  # whose configurations may come and go
            _check_word(f"{where}.us", name, IMPLEMENTATIONS)
        _check_duration(f"{where}.us.{name}", value)
    for name, value in mere.items():
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{where}.mere.{name}: expected an error from 0, got {value!r}")
    if bf16_us is not None:
        _check_duration(f"{where}.bf16_us", bf16_us)
    return shape, Entry(
        {name: float(value) for name, value in us.items()},
        None if bf16_us is None else float(bf16_us),
        {name: float(value) for name, value in mere.items()},
    )


def _check_word(where: str, word: Any, expected: tuple[str, ...]) -> None:
    if word not in expected:
        raise ValueError(f"{where}: expected one of {', '.join(expected)}, got {word!r}")


def _check_duration(where: str, us: Any) -> None:
    if type(us) not in (int, float) or not (math.isfinite(us) and us > 0):
        raise ValueError(f"{where}: expected microseconds above 0, got {us!r}")
