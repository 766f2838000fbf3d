"""What the hopper engine refuses before it reads a weight."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines import load_engine
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper import support
from loka_serve.errors import EngineError
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.plan import PrecisionPlan

CONFIG = PRESETS["onerec-v2-4b-a0.5b"]


def test_presets_are_supported() -> None:
    for config in PRESETS.values():
        support.check_model(config)
        support.check_limits(config, EngineLimits(8, config.beam_width, config.max_context, config.levels))


@pytest.mark.parametrize(
    ("field", "value"), [("head_dim", 96), ("d_model", 1400), ("expert_width", 100), ("d_ff", 8), ("experts", 256)]
)
def test_shapes_that_kernels_do_not_take_are_named(field: str, value: int) -> None:
    with pytest.raises(EngineError, match=f"config {field} {value}"):
        support.check_model(dataclasses.replace(CONFIG, **{field: value}))


def test_trained_in_variants_without_kernels_are_named() -> None:
    support.check_model(dataclasses.replace(CONFIG, norm="block"))
    support.check_model(dataclasses.replace(PRESETS["onerec-v2-1b"], norm="block", activation="hard_swish"))
    with pytest.raises(EngineError, match="config linear_bias true: the hopper engine runs linears without bias"):
        support.check_model(dataclasses.replace(CONFIG, linear_bias=True))
    with pytest.raises(EngineError, match="config activation hard_swish with experts"):
        support.check_model(dataclasses.replace(CONFIG, activation="hard_swish"))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (EngineLimits(8, 512, 3001, 3), "context at most 3000"),
        (EngineLimits(8, 512, 3000, 2), "expected levels = 3"),
        (EngineLimits(8, 1025, 3000, 3), r"limits\.beam 1025: the hopper engine runs at most 1024"),
    ],
)
def test_limits_out_of_reach_are_named(limits: EngineLimits, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        support.check_limits(CONFIG, limits)


def test_recipes_that_do_not_run_are_named_by_site() -> None:
    with torch.device("meta"):
        sites = OneRecV2(PRESETS["tiny"]).sites()
    for recipe in ("bf16", "fp8_block"):
        support.check_plan(PrecisionPlan.uniform(sites, recipe))
    mixed = dict.fromkeys(sites, "fp8_row") | {site: "fp8_block" for site in sites if site.endswith(".moe.down")}
    support.check_plan(PrecisionPlan(mixed))
    with pytest.raises(EngineError, match=r"site layers\.1\.moe\.down: recipe fp8_row: .* bf16 or fp8_block"):
        support.check_plan(PrecisionPlan.uniform(sites, "fp8_row"))
    with pytest.raises(EngineError, match=r"site heads\.0: recipe int8_row"):
        support.check_plan(PrecisionPlan(mixed | {"heads.0": "int8_row"}))


def test_a_catalog_of_larger_codebooks_is_refused() -> None:
    catalog = Catalog.build(["a"], np.array([[0, 1, 2]]), codebook_sizes=(256, 256, 257))
    with pytest.raises(EngineError, match=r"\(256, 256, 257\): expected at most the model's \(256, 256, 256\)"):
        support.check_catalog(catalog, PRESETS["tiny"])


def test_a_device_without_hopper_is_refused() -> None:
    with pytest.raises(EngineError, match="device cpu: the hopper engine runs on a CUDA device"):
        support.check_device(torch.device("cpu"))


def test_the_engine_is_known_by_name() -> None:
    with pytest.raises(EngineError, match="expected one of reference, hopper"):
        load_engine(None, "warp", "cpu", EngineLimits(1, 1, 1, 3))  # type: ignore[arg-type]
