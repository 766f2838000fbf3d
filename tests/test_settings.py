"""Flags and environment variables: a flag wins, and a bad value is named with what was expected."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from loka_serve.build_config import BuildConfig
from loka_serve.config import ServerConfig
from loka_serve.drift.options import DriftOptions
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.errors import ConfigError
from loka_serve.settings import OutputPath


def read(*arguments: str, **environment: str) -> ServerConfig:
    return ServerConfig.from_command_line(arguments, environment)


def test_defaults(tmp_path: Path) -> None:
    config = read("--bundle", str(tmp_path))
    assert (config.host, config.port, config.engine, config.device) == ("127.0.0.1", 8000, "auto", "auto")
    assert config.allow_catalog_updates is False
    assert config.bundle == tmp_path


def test_every_field_is_a_flag_and_a_variable_and_the_flag_wins(tmp_path: Path) -> None:
    values = {
        "bundle": str(tmp_path), "engine": "reference", "device": "cuda:1", "cpu_threads": "3", "model_name": "m",
        "max_beam_width": "64", "max_context": "100", "host": "::1", "port": "1", "max_batch": "2",
        "max_delay_ms": "1.5", "beam_width": "15", "max_connections": "17",
        "max_queue": "4", "max_body_bytes": "5", "max_batch_requests": "6",
        "default_timeout_ms": "7.5", "body_timeout_s": "8", "allow_catalog_updates": "true", "max_catalog_bytes": "9",
        "engine_start_timeout_s": "10", "engine_batch_timeout_s": "11", "engine_restarts": "12",
        "hopper_context_precision": "fp8", "hopper_batches": "1,8", "hopper_beams": "128, 512", "hopper_contexts": "9",
        "hopper_memory_share": "0.5", "hopper_catalog_headroom": "2", "hopper_tune": "true", "drain_timeout_s": "13",
        "log_level": "debug", "summary_interval_s": "14", "frozen_dispatch": "true", "hopper_batch_invariant": "true",
        "watch_catalog": str(tmp_path / "items.jsonl"), "max_batch_cost": "17",
        "tenant_header": "X-Tenant", "queue_share": "0.25",
        "drift_sample_every": "15", "drift_window": "16", "drift_psi_limit": "0.5", "drift_amax_ratio": "1.5",
        "log_format": "json", "tracing": "otlp", "api_keys_file": str(tmp_path), "allow_debug": "true",
    }  # fmt: skip
    assert set(values) == {field.name for field in dataclasses.fields(ServerConfig)}
    from_variables = read(**{f"LOKA_{name.upper()}": value for name, value in values.items()})
    flags = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        flags.extend([flag] if value == "true" else [flag, value])
    assert read(*flags) == from_variables
    assert (from_variables.device, from_variables.max_delay_ms, from_variables.max_batch) == ("cuda:1", 1.5, 2)
    assert from_variables.allow_catalog_updates is True
    assert from_variables.hopper_options == HopperOptions(
        "fp8", True, True, True, True, "radix", (1, 8), (128, 512), (9,), 0.5, 2.0, True
    )
    assert from_variables.drift_options == DriftOptions(15, 16, 0.5, 1.5)
    assert read(*flags, LOKA_MAX_BATCH="99", LOKA_LOG_LEVEL="error") == from_variables
    assert read(*flags, "--no-allow-catalog-updates").allow_catalog_updates is False


def test_the_hopper_engine_has_its_own_defaults_unless_told_otherwise(tmp_path: Path) -> None:
    assert read("--bundle", str(tmp_path)).hopper_options == HopperOptions()
    assert read("--bundle", str(tmp_path), "--hopper-batches", "auto").hopper_options == HopperOptions()
    untuned = HopperOptions(tune=False)
    assert read("--bundle", str(tmp_path), LOKA_HOPPER_TUNE="off").hopper_options == untuned
    assert read("--bundle", str(tmp_path), "--no-hopper-tune", LOKA_HOPPER_TUNE="on").hopper_options == untuned
    assert HopperOptions.from_json(untuned.to_json()) == untuned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hopper-batches", "8,1"], "--hopper-batches: expected auto, or ascending whole numbers from 1 like 1,8,32"),
        (["--hopper-beams", "0"], "--hopper-beams: expected auto, or ascending whole numbers from 1 like 1,8,32"),
        (["--hopper-contexts", "512.0"], "--hopper-contexts: expected auto, or ascending whole numbers from 1"),
        (["--hopper-contexts", ""], "--hopper-contexts: expected auto, or ascending whole numbers from 1"),
        (["--hopper-context-precision", "fp4"], "--hopper-context-precision: expected one of bf16, fp8, got 'fp4'"),
        (["--hopper-memory-share", "nan"], "--hopper-memory-share: expected a number from 0.01 to 1, got 'nan'"),
        (
            ["--hopper-catalog-headroom", "inf"],
            "--hopper-catalog-headroom: expected a number from 1 to 1000, got 'inf'",
        ),
        (["--port", "70000"], "--port: expected a whole number from 0 to 65535, got '70000'"),
        (["--port", "8000.5"], "--port: expected a whole number from 0 to 65535, got '8000.5'"),
        (["--max-delay-ms", "nan"], "--max-delay-ms: expected a number from 0 to 10000, got 'nan'"),
        (["--max-delay-ms", "-1"], "--max-delay-ms: expected a number from 0 to 10000, got '-1'"),
        (["--engine", "warp"], "--engine: expected one of auto, reference"),
        (["--device", "gpu"], "--device: expected auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["--device", "cpu:1"], "--device: expected auto, cpu, cuda or cuda:N, got 'cpu:1'"),
        (["--bundle", "/no/such/place"], "--bundle: expected an existing directory, got '/no/such/place'"),
        (["--host", ""], "--host: expected a text that is not empty, got ''"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-bat", "3"], "unrecognized arguments: --max-bat 3"),
        (["--port"], "argument --port: expected one argument"),
    ],
)
def test_a_bad_flag_is_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*(["--bundle", str(tmp_path)] if "--bundle" not in arguments else []), *arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^LOKA_MAX_BATCH: expected a whole number from 0 to 4096, got 'many'$"):
        read("--bundle", str(tmp_path), LOKA_MAX_BATCH="many")
    with pytest.raises(ConfigError, match="^LOKA_ALLOW_CATALOG_UPDATES: expected true or false, got 'maybe'$"):
        read("--bundle", str(tmp_path), LOKA_ALLOW_CATALOG_UPDATES="maybe")


def test_a_required_setting_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^--bundle \(or LOKA_BUNDLE\) is missing: expected an existing directory$"):
        read()


def test_an_output_path_ends_in_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written there first gets a name of its own, made from this one."""
    monkeypatch.chdir(tmp_path)
    assert OutputPath().parse("bundle/") == tmp_path / "bundle"
    assert OutputPath().parse(".") == tmp_path
    for text in ("/", "//", "/.", "bundle/..", "..", "", " "):
        with pytest.raises(ValueError):
            OutputPath().parse(text)


def test_a_file_s_line_is_read_where_neither_flag_nor_variable_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        f'bundle = "{tmp_path}"\nmax_batch = 2\nmax-queue = 3\nport = 4\nmax_delay_ms = 1.5\n'
        "hopper_beams = [128, 512]\nallow_catalog_updates = true\nhopper_tune = false\n"
    )
    config = read("--config", str(file), "--port", "5", LOKA_PORT="6", LOKA_MAX_QUEUE="7")
    assert (config.bundle, config.max_batch, config.max_queue, config.port) == (tmp_path, 2, 7, 5)
    assert (config.max_delay_ms, config.hopper_beams, config.allow_catalog_updates) == (1.5, (128, 512), True)
    assert (config.hopper_tune, config.max_context) == (False, 0)
    assert read(LOKA_CONFIG=str(file)).max_batch == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_bach = 2", "max_bach: unknown setting; did you mean max_batch?"),
        ("[server]\nport = 1", "server: unknown setting"),
        ("max_batch = 5000", "max_batch: expected a whole number from 0 to 4096, got '5000'"),
        ("max_batch = true", "max_batch: expected a whole number from 0 to 4096, got 'True'"),
        ("max_batch = 1.5", "max_batch: expected a whole number from 0 to 4096, got '1.5'"),
        ("allow_debug = 2", "allow_debug: expected true or false, got '2'"),
        ("max_batch = {a = 1}", "max_batch: expected a text, a number, true or false, or a list of whole numbers"),
        ('hopper_beams = ["a"]', "hopper_beams: expected a text, a number, true or false, or a list of whole numbers"),
        ("max_batch = 1\nmax-batch = 2", "max-batch: expected each setting once"),
        ("max_batch = 1\nmax_batch = 2", "expected TOML: Cannot overwrite a value"),
        ("port", "expected TOML: Expected '=' after a key in a key/value pair (at end of document)"),
        ("# " + "x" * (1 << 20), "larger than 1048576 bytes"),
    ],
    ids=lambda given: given[:20],
)
def test_a_bad_line_of_a_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read("--bundle", str(tmp_path), "--config", str(file))
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_the_build_reads_its_own_file(tmp_path: Path) -> None:
    file = tmp_path / "build.toml"
    file.write_text("".join(f'{name} = "{tmp_path}"\n' for name in ("checkpoint", "catalog", "calibration", "out")))
    config = BuildConfig.from_command_line(["--config", str(file), "--seed", "3"], {})
    assert (config.checkpoint, config.seed) == (tmp_path, 3)
    file.write_text("port = 1\n")
    with pytest.raises(ConfigError, match="port: unknown setting"):
        BuildConfig.from_command_line(["--config", str(file)], {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file or directory"):
        read("--config", str(tmp_path / "none.toml"))
