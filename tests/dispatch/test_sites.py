"""What of a model is measured, and the gain that a table promises."""

from __future__ import annotations

import dataclasses

import pytest

from loka_serve.dispatch.sites import (
    MEASURED_RECIPES,
    ROWS,
    Work,
    names_of_work,
    shapes_to_measure,
    speedup,
    work_of_sites,
)
from loka_serve.models.config import PRESETS
from tests.dispatch.tables import table

PRESET = PRESETS["onerec-v2-4b-a0.5b"]


def test_the_preset_has_six_kinds_of_work() -> None:
    works = names_of_work(work_of_sites(PRESET))
    assert {work.key for work in works} == {
        ("linear", 1408, 1408, 1),
        ("linear", 4224, 1408, 1),
        ("linear", 7680, 1408, 1),
        ("linear", 1408, 3840, 1),
        ("linear_float32", 8192, 1408, 1),
        ("experts", 1408, 1408, 54),  # the shared one runs as one more
    }
    assert works[Work("linear_float32", 8192, 1408)] == "heads.*"
    experts = next(work for work in works if work.op == "experts")
    assert (experts.slots, experts.shared) == (4, 1)
    assert works[experts].startswith("layers.*.moe.gate_up, layers.*.moe.down")


def test_shared_experts_that_are_wider_run_on_their_own() -> None:
    sites = work_of_sites(dataclasses.replace(PRESET, shared_experts=2))
    assert sites["layers.5.moe.gate_up"].groups == 53 and sites["layers.5.moe.gate_up"].shared == 0
    assert sites["layers.5.moe.shared.gate_up"] == Work("linear", 4 * 1408, 1408)
    assert not any(name.endswith(".router") for name in sites)


def test_experts_are_measured_in_what_they_run_in() -> None:
    works = names_of_work(work_of_sites(PRESET))
    shapes = shapes_to_measure(works, (8, 512))
    assert len(shapes) == len(set(shapes)) == 2 * (5 * len(MEASURED_RECIPES) + 2)
    assert [shape.rows for shape in shapes] == sorted(shape.rows for shape in shapes)
    assert ROWS[0] == 1 and ROWS[-1] == 16384


def test_a_gain_is_of_the_summed_times() -> None:
    made = table(PRESET, lambda shape: 20.0 if shape.rows <= 8 else 4.0)
    work = Work("linear", 4224, 1408)
    assert speedup(made, work, "fp8_row", [4096]) == pytest.approx(2.5)
    assert speedup(made, work, "fp8_row", [1, 8]) == pytest.approx(0.5)
    assert speedup(made, work, "fp8_row", [5, 4096, 3000]) == pytest.approx(30 / 28)  # 5 rows as 8 take
    assert speedup(made, work, "int8_row", [8]) is None
    assert speedup(made, Work("linear", 1, 1), "fp8_row", [8]) is None
