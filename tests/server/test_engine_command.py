"""What the API process tells the engine process about its engine arrives there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import loka_serve.engines
from loka_serve.bundle import Bundle
from loka_serve.config import ServerConfig
from loka_serve.drift.options import DriftOptions
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.models.config import PRESETS
from loka_serve.server import engine_process
from loka_serve.server.state import engine_command, served_model


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], HopperOptions()),
        (
            ["--hopper-context-precision", "fp8", "--hopper-batches", "1,8", "--hopper-contexts", "9"]
            + ["--hopper-memory-share", "0.5", "--no-hopper-tune", "--drift-sample-every", "7"],
            HopperOptions(context_precision="fp8", batches=(1, 8), contexts=(9,), memory_share=0.5, tune=False),
        ),
    ],
)
def test_limits_and_options_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], options: HopperOptions
) -> None:
    config = ServerConfig.from_command_line(["--bundle", str(tmp_path), "--max-batch", "8", *flags], {})
    limits = EngineLimits(32, 16, 64, 3)
    parts = {"config": PRESETS["tiny"], "limits": limits, "engine": "hopper", "model_name": "tiny"}
    bundle = cast(Bundle, SimpleNamespace(**parts, catalog="catalog", probe={}))
    engine = SimpleNamespace(name="hopper")
    command = engine_command(config, bundle, served_model(config, bundle))
    loaded: list[tuple[Any, ...]] = []

    def load_engine(*arguments: Any) -> SimpleNamespace:
        loaded.append(arguments)
        return engine

    def serve(arguments: argparse.Namespace, load: Callable[[], tuple[Any, Any, str]]) -> None:
        assert load() == (engine, "catalog", "cpu")

    monkeypatch.setattr(engine_process, "serve", serve)
    monkeypatch.setattr(loka_serve.engines, "load_engine", load_engine)
    monkeypatch.setattr(Bundle, "load", lambda path: bundle)
    connection = ["--endpoint", "ipc://nowhere", "--parent", "1"]
    monkeypatch.setattr("sys.argv", [*command[2:], *connection, "--device", "cpu"])
    engine_process.main()
    drift = command[command.index("--drift-options") + 1]
    assert DriftOptions.from_json(drift) == DriftOptions(sample_every=7 if flags else DriftOptions.sample_every)
    assert loaded == [(bundle, "hopper", "cpu", EngineLimits(8, 128, 64, 3), options)]
