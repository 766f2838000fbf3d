"""The kernel benchmark's table of operations, and what a result says about its origin."""

from __future__ import annotations

import importlib
import inspect
import json

import pytest

from benchmarks import kernels
from benchmarks.environment import describe_environment
from tests.kernels.devices import needs_triton


@needs_triton
@pytest.mark.parametrize("operation", list(kernels.BENCHES))
def test_every_operation_has_rows(operation: str) -> None:
    bench = importlib.import_module(f"loka_serve.kernels.{kernels.BENCHES[operation]}")
    required = [p for p in inspect.signature(bench.rows).parameters.values() if p.default is p.empty]
    assert inspect.isgeneratorfunction(bench.rows) and not required


def test_a_given_commit_is_recorded() -> None:
    environment = describe_environment("abc1234")
    assert environment["commit"] == "abc1234"
    assert describe_environment()["commit"] != "abc1234"
    json.dumps(environment)
