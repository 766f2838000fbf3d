"""Experts for the dispatch table: names of configurations, the reference, and a ranking by a scripted clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from loka_serve.kernels.dispatch_file import Shape  # noqa: E402
from loka_serve.kernels.moe import measure  # noqa: E402
from loka_serve.kernels.moe.configurations import BF16_CONFIGURATIONS, FP8_CONFIGURATIONS, Configuration  # noqa: E402
from loka_serve.kernels.moe.experts import Tiling  # noqa: E402
from loka_serve.kernels.moe.measure import _exact, _tokens, _values_of, _weights  # noqa: E402

SMALL = Shape("experts", "fp8_block", 128, 128, 5, groups=4, slots=3, shared=1)


def test_every_configuration_has_a_name_of_its_own() -> None:
    for recipe, table in (("bf16", BF16_CONFIGURATIONS), ("fp8_block", FP8_CONFIGURATIONS)):
        assert list(measure.configurations_of(recipe).values()) == list(dict.fromkeys(it for _, it in table))
    assert measure.configurations_of("fp8_row") == {}
    assert measure.rank_configurations(SMALL.in_recipe("fp8_row"), "cpu") == []


def test_small_blocks_are_not_tried_on_many_rows() -> None:
    weights = measure._quantized("bf16", torch.zeros(4, 256, 128), torch.zeros(4, 128, 128))
    few = measure.configurations_for(SMALL.in_recipe("bf16"), weights)
    assert any(use.gate_up.block_m == 16 for use in few.values())
    many = measure.configurations_for(Shape("experts", "bf16", 128, 128, 16384, 4, 3, 1), weights)
    assert many and all(use.gate_up.block_m == 128 for use in many.values())
    assert all(use.library is None for use in many.values())  # which runs on a GPU alone


def test_the_reference_is_each_token_s_experts_in_turn() -> None:
    gate_up, down = _weights(SMALL, "cpu")
    x, routing = _values_of(SMALL, "cpu", 0), _tokens(SMALL, "cpu", 0).routing
    exact = _exact(x, routing, gate_up, down)
    assert exact.shape == (5, 3, 128)
    assert (routing.selected[:, -1] == 3).all()  # every token goes to the shared one
    for token in range(5):
        for slot in range(3):
            expert = int(routing.selected[token, slot])
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected = down[expert].double() @ (torch.nn.functional.silu(gate) * up)
            assert torch.allclose(exact[token, slot].double(), expected, rtol=1e-4, atol=1e-5)  # float32 sums of 128


def test_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, with a scripted clock."""
    narrow, wide = Tiling(16, warps=4, stages=3), Tiling(16, warps=4, stages=5)
    uses = (Configuration(narrow, narrow), Configuration(wide, wide))
    script = {3: [10.0, 9.5], 5: [9.8, 9.9]}
    seen: list[int] = []

    def time_us(call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], repeats: int) -> float:
        return script[seen[-1]].pop(0)

    def gate_up(x: Any, scale: Any, weight: Any, weight_scale: Any, rows: Any, tiling: Tiling, quantize: bool) -> Any:
        seen.append(tiling.stages)
        return original(x, scale, weight, weight_scale, rows, tiling, quantize)

    original = measure.gate_up_swiglu
    monkeypatch.setattr(measure, "gate_up_swiglu", gate_up)
    monkeypatch.setattr(measure, "time_us", time_us)
    monkeypatch.setattr(measure, "_table", lambda recipe: tuple((8.0, use) for use in uses))
    monkeypatch.setattr(measure, "MOST_COPIES", 2)
    ranked = measure.rank_configurations(SMALL, "cpu")
    assert [(timing.implementation, timing.us) for timing in ranked] == [
        (measure.configuration_name(uses[0]), 9.5),
        (measure.configuration_name(uses[1]), 9.9),
    ]
    # E4M3 in both GEMMs: 0.08 for one, and the hidden rows are rounded once more.
    assert all(0.05 < timing.mere < 0.2 and timing.error < 0.1 for timing in ranked)
