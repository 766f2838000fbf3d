"""The floor against figures worked out by hand for the 4B-A0.5B preset."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.floor import Ceilings, Operation, context_operations, floor_ms, step_operations
from loka_serve.models.config import PRESETS

CONFIG = PRESETS["onerec-v2-4b-a0.5b"]
H200 = Ceilings(bf16_tflops=795.0, fp8_tflops=1499.0, gb_per_s=4250.0)
D, LAYERS = 1408, 14


def step(level: int, batch: int, precision: str = "fp8") -> dict[str, Operation]:
    return {entry.name: entry for entry in step_operations(CONFIG, precision, level, batch, 512, 3000)}


def test_a_decode_step_has_the_arithmetic_of_the_design() -> None:
    operations = step(level=1, batch=8)
    gemm = sum(operations[name].flops for name in ("linears", "experts", "head"))
    assert gemm / 1e12 == pytest.approx(4.1, abs=0.05)
    assert operations["attention"].flops / 1e12 == pytest.approx(0.97, abs=0.005)
    milliseconds = {name: H200.milliseconds(entry) for name, entry in operations.items()}
    assert milliseconds["linears"] + milliseconds["experts"] + milliseconds["head"] == pytest.approx(2.7, abs=0.05)
    assert milliseconds["attention"] == pytest.approx(1.2, abs=0.03)


def test_flops_by_hand() -> None:
    operations = step(level=2, batch=8)
    rows = 8 * 512
    per_layer = 6 * D * D  # q, o, qkv, o
    assert operations["linears"].flops == 2 * rows * (LAYERS * per_layer + 2 * 3 * D * 3840 + 12 * 53 * D)
    assert operations["experts"].flops == 2 * rows * 4 * 3 * D * D * 12
    assert operations["head"].flops == 2 * rows * 8192 * D
    assert operations["attention"].flops == 4 * rows * 3001 * D * LAYERS
    assert operations["beams"].flops == 4 * rows * 3 * D * LAYERS
    # Keys and values of one, 512 and 512 beams; queries and results.
    assert operations["beams"].traffic == (2 * 8 * (1 + 512 + 512) + 2 * rows) * D * 2 * LAYERS


def test_the_first_step_reads_weights() -> None:
    operations = step(level=0, batch=1)
    linear_weights = LAYERS * 6 * D * D + 2 * 3 * D * 3840 + 12 * 53 * D
    assert operations["linears"].traffic == pytest.approx(linear_weights, rel=0.01)
    # One token touches its three experts and the shared one.
    assert operations["experts"].traffic == pytest.approx(12 * 4 * 3 * D * D, rel=0.01)
    assert operations["head"].traffic == pytest.approx(8192 * D, rel=0.01)
    assert operations["attention"].traffic == pytest.approx(LAYERS * 3001 * D * 2, rel=0.01)
    for entry in operations.values():
        assert H200.milliseconds(entry) == pytest.approx(entry.traffic / 4250e6)
    # With very many tokens every expert is read.
    many = step(level=1, batch=32)["experts"]
    rows = 32 * 512
    activations = rows * D + 2 * 4 * rows * D + rows * D * 2
    assert many.traffic == pytest.approx(12 * (54 * 3 * D * D + activations))


def test_bf16_doubles_the_weights() -> None:
    assert step(0, 1, "bf16")["head"].traffic == pytest.approx(2 * step(0, 1)["head"].traffic, rel=1e-6)


def test_context_by_hand() -> None:
    (operation,) = context_operations(CONFIG, "fp8", 8, 3000)
    positions = 8 * 3001
    assert operation.flops == 2 * positions * D * D
    assert operation.traffic == positions * D * 2 * 3 + D * D + positions * D * 2


def test_floor_is_the_sum_and_falls_with_each_ceiling() -> None:
    floor = floor_ms(CONFIG, "fp8", 8, 512, 3000, H200)
    assert 7.0 < floor < 11.0
    assert floor_ms(CONFIG, "bf16", 8, 512, 3000, H200) > 1.4 * floor
    assert floor_ms(CONFIG, "fp8", 8, 512, 3000, H200, context_precision="fp8") < floor - 0.8
    for field, value in dataclasses.asdict(H200).items():
        assert floor_ms(CONFIG, "fp8", 8, 512, 3000, dataclasses.replace(H200, **{field: 2 * value})) < floor


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_floor(preset: str) -> None:
    assert floor_ms(PRESETS[preset], "bf16", 2, 16, 64, H200) > 0


def test_beams_are_no_more_than_there_are_prefixes() -> None:
    config = dataclasses.replace(CONFIG, codebook_sizes=(4, 8192, 8192))
    operations = {entry.name: entry for entry in step_operations(config, "fp8", 1, 8, 512, 3000)}
    assert operations["attention"].flops == 4 * 8 * 4 * 3001 * D * LAYERS
