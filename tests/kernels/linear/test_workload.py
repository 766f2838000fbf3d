"""Ranking of implementations by a scripted clock, and the error that the rule reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.linear import workload as module
from loka_serve.kernels.linear.workload import floored_mere, make_operands, make_values, rank_implementations
from loka_serve.probe.errors import output_error


def test_floored_mere_is_the_probe_s() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(64, 96, generator=generator)
    found = (expected + 0.03 * torch.randn(64, 96, generator=generator)).bfloat16()
    assert floored_mere(found, expected) == pytest.approx(output_error(found, expected).floored_mere, rel=1e-12)
    found[3, 4] = math.nan
    assert math.isnan(floored_mere(found, expected))


def test_operands_are_the_values_that_errors_are_measured_from() -> None:
    x, weight = make_values(4, 32, 128, "cpu", seed=3)
    for recipe in ("bf16", "fp8_row", "fp8_block", "fp8_tensor"):
        codes, _, weight_codes, _ = make_operands(recipe, 4, 32, 128, "cpu", seed=3)
        assert codes.shape == x.shape and weight_codes.shape == weight.shape
    assert torch.equal(make_operands("bf16", 4, 32, 128, "cpu", seed=3)[0], x)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Scripted microseconds of each implementation, one a timing; each computes what the reference does."""
    script: dict[str, list[float]] = {}
    running: list[str] = []

    def linear(x: Tensor, scale: Tensor | None, w: Tensor, w_scale: Tensor | None, name: str, out: Any) -> Tensor:
        running.append(name)
        if name == "refuses":
            raise RuntimeError("this shape is none of ours")
        product = module.reference.linear(x, scale, w, w_scale).to(out)
        return product * 1.5 if name == "wrong" else product

    def time_us(call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], repeats: int) -> float:
        return script[running[-1]].pop(0)

    monkeypatch.setattr(module, "linear", linear)
    monkeypatch.setattr(module, "time_us", time_us)
    return script


def test_those_close_to_the_fastest_are_timed_again(clock: dict[str, list[float]]) -> None:
    clock.update(a=[10.0, 10.4], b=[10.5, 9.9], c=[11.2], wrong=[1.0], refuses=[1.0])
    ranked = rank_implementations(list(clock), "fp8_row", 4, 32, 64, "cpu")
    assert [(timing.implementation, timing.us) for timing in ranked] == [("b", 9.9), ("a", 10.4), ("c", 11.2)]
    assert clock == {"a": [], "b": [], "c": [], "wrong": [1.0], "refuses": [1.0]}  # neither was timed
    # E4M3 with a scale a row errs by 0.08 on Gaussian values, BF16 by a tenth of that.
    assert all(0.05 < timing.mere < 0.12 for timing in ranked)


def test_one_that_is_fastest_by_far_is_timed_once(clock: dict[str, list[float]]) -> None:
    clock.update(a=[5.0], b=[10.5])
    assert [timing.us for timing in rank_implementations(["b", "a"], "bf16", 4, 32, 64, "cpu")] == [5.0, 10.5]
    assert rank_implementations([], "bf16", 4, 32, 64, "cpu") == []
