"""Splitting the graph: levels share segments, and the steps say the same as the graph."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.steps import OperationStep, SegmentStep, Stitching
from loka_serve.models.config import OneRecV2Config
from tests.engines.tensorrt.weights import TINY, mixed_plan, random_model, write_weights


def stitch(tmp_path: Path, config: OneRecV2Config = TINY) -> Stitching:
    model = random_model(config)
    plan = mixed_plan(model)
    return export(config, plan, write_weights(tmp_path, model, plan), "float32")


def test_levels_share_all_segments_but_the_first_and_the_last(tmp_path: Path) -> None:
    stitching = stitch(tmp_path)
    names = [segment.name for segment in stitching.segments]
    assert sorted(names) == sorted(
        [
            "context-projection",
            *("bos", "token_embeddings-0", "token_embeddings-1"),
            *(f"heads-{level}" for level in range(3)),
            *(f"layers-{layer}-{part}_attention-output" for layer in range(3) for part in ("cross", "self")),
            "layers-2-cross_attention-query",  # after the first mixture of experts
        ]
    )
    calls = [step.segment for step in stitching.steps if isinstance(step, SegmentStep)]
    assert calls.count("layers-1-cross_attention-output") == TINY.levels
    assert stitching.rows_of("layers-1-cross_attention-output") == {"batch", "beam_rows"}
    assert stitching.rows_of("context-projection") == {"context_rows"}


def test_a_dense_last_layer_is_still_shared(tmp_path: Path) -> None:
    stitching = stitch(tmp_path, dataclasses.replace(TINY, first_dense_layers=3))
    calls = [step.segment for step in stitching.steps if isinstance(step, SegmentStep)]
    assert calls.count("layers-2-self_attention-output") == TINY.levels
    assert calls.count("heads-1") == 1


def test_every_value_is_made_before_it_is_read(tmp_path: Path) -> None:
    stitching = stitch(tmp_path, dataclasses.replace(TINY, position_encoding="rotary"))
    known = {"history", "lengths", "features", "present", "begin", "beam_widths", "filtered", ""}
    known |= {f"{name}_{level}" for name in ("first_child", "codes", "allowed") for level in range(TINY.levels)}
    for step in stitching.steps:
        assert set(step.inputs) <= known
        known |= set(step.outputs)
    assert set(stitching.outputs) <= known


def test_steps_survive_json(tmp_path: Path) -> None:
    stitching = stitch(tmp_path)
    again = Stitching.from_dict(json.loads(json.dumps(stitching.to_dict())), tmp_path)
    assert again == stitching
    experts = [step for step in again.steps if isinstance(step, OperationStep) and step.operation == "MoE"]
    assert [step.attributes["layer"] for step in experts] == [1, 2] * TINY.levels
