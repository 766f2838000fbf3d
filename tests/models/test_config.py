"""Configurations: every value that no model has is refused in one line that names the field."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import pytest
import torch

from loka_serve.errors import CheckpointError
from loka_serve.models.config import INTEGERS, NUMBERS, PRESETS, WORDS, FeatureConfig, OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2

TINY = PRESETS["tiny"].to_dict()


def error(**change: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        OneRecV2Config.from_dict({**TINY, **change})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_field_has_its_check() -> None:
    others = {"codebook_sizes", "linear_bias", "features"}
    assert INTEGERS.keys() | NUMBERS.keys() | WORDS.keys() | others == {
        field.name for field in dataclasses.fields(OneRecV2Config)
    }


@pytest.mark.parametrize("field", INTEGERS)
def test_integers_are_exactly_that_and_in_range(field: str) -> None:
    low, high = INTEGERS[field]
    for value in (float(TINY[field]), 1.5, True, None, "8", [8], {}, low - 1, high + 1, 10**30, -(10**30), math.nan):
        assert error(**{field: value}) == f"config {field} = {value!r}: expected an integer from {low} to {high}"


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_are_finite_and_in_range(field: str) -> None:
    for value in (math.nan, math.inf, -math.inf, 0, 0.0, -1, None, "x", True, [1.0], 10**400):
        assert error(**{field: value}).startswith(f"config {field} = {repr(value)[:97]}")


def test_a_whole_number_may_be_written_as_an_integer() -> None:
    assert OneRecV2Config.from_dict({**TINY, "rotary_theta": 500_000}).rotary_theta == 500_000


@pytest.mark.parametrize(
    "value",
    [[256.9, 256, 256], "256", None, [], [256], [256] * 6, [0, 1, 1], [True, 1, 1], [2**24 + 1, 1, 1], [10**30] * 3, 7],
)
def test_codebook_sizes(value: Any) -> None:
    assert error(codebook_sizes=value).endswith(": expected 2 to 5 integers from 1 to 16777216")


@pytest.mark.parametrize("field", WORDS)
def test_words_are_of_a_few(field: str) -> None:
    for value in ("sinus", ["recency"], None, 1, True):
        assert error(**{field: value}) == f"config {field} = {value!r}: expected one of {', '.join(WORDS[field])}"


def test_linear_bias_is_true_or_false() -> None:
    for value in ("true", 1, 0, None, []):
        assert error(linear_bias=value) == f"config linear_bias = {value!r}: expected true or false"


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("abc", "config features = 'abc': expected a list of objects"),
        (None, "config features = None: expected a list of objects"),
        ([5], "config features[0] = 5: expected an object"),
        ([{"name": "a"}], "config features[0] = {'name': 'a'}: expected an object"),
        ([{"name": "a", "values": [], "more": 1}], "config features[0] = {'name': 'a', 'values': [], 'more': 1}: exp"),
        ([{"name": "a", "values": "xy"}], "config features[0].values = 'xy': expected a list of texts"),
        ([{"name": 5, "values": []}], "config features[0].name = 5: expected a text that is not empty"),
        ([{"name": ["a"], "values": []}], "config features[0].name = ['a']: expected a text that is not empty"),
        ([{"name": "", "values": []}], "config features[0].name = '': expected a text that is not empty"),
        ([{"name": "\ud800", "values": []}], r"config features[0].name = '\ud800': expected valid Unicode text"),
        ([{"name": "a", "values": ["x", 1]}], "config features[0].values[1] = 1: expected a text that is not empty"),
        ([{"name": "a", "values": ["x", ""]}], "config features[0].values[1] = '': expected a text that is not empty"),
        ([{"name": "a", "values": ["x", "x"]}], "config features[0].values[1] = 'x': expected distinct texts"),
        ([{"name": "a", "values": []}] * 2, "config features[1].name = 'a': expected distinct texts"),
    ],
)
def test_features(features: Any, message: str) -> None:
    assert error(features=features).startswith(message)


def test_features_given_in_code() -> None:
    config = dataclasses.replace(PRESETS["tiny"], features=(FeatureConfig("a", ("x",)), FeatureConfig("b", ("x",))))
    assert OneRecV2Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(CheckpointError, match="features"):
        dataclasses.replace(config, features=("a",))


def test_a_missing_field_is_named() -> None:
    values = {name: value for name, value in TINY.items() if name != "heads"}
    with pytest.raises(CheckpointError, match="config heads is missing: expected an integer from 1 to 4096"):
        OneRecV2Config.from_dict(values)


def test_long_and_deep_values_are_cut() -> None:
    assert error(d_model="x" * 10**6) == f"config d_model = '{'x' * 96}...: expected an integer from 1 to 1048576"
    assert len(error(unknown="x" * 10**6, **{"y" * 10**6: 1})) < 1000
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert error(d_model=deep) == "config d_model = <list>: expected an integer from 1 to 1048576"
    assert "expected an integer" in error(d_model=10**5000)  # more digits than Python writes


def test_the_largest_shapes_neither_overflow_nor_hang() -> None:
    """Layers are built one by one, so they are what could take long; shapes without storage cost nothing."""
    sizes = {field: high for field, (_, high) in INTEGERS.items()}
    config = OneRecV2Config(**sizes, codebook_sizes=(2**24,) * 5)  # type: ignore[arg-type]
    one_layer = dataclasses.replace(config, layers=1, kv_layers=1, first_dense_layers=0, kv_split=1)
    started = time.process_time()
    with torch.device("meta"):
        model = OneRecV2(one_layer)
        many = OneRecV2(dataclasses.replace(PRESETS["tiny"], layers=1024, kv_layers=1024))
    assert max(parameter.nbytes for parameter in model.parameters()) == 65_536 * 2 * 2**20 * 2**20 * 4
    assert config.d_context * config.d_model * 4 < 2**63
    assert len(many.layers) == 1024
    assert time.process_time() - started < 60
