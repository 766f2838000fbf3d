"""Shapes that are measured, and the file that keeps what was found."""

from __future__ import annotations

import dataclasses
import errno
import os
import pwd
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

pytest.importorskip("triton")
from loka_serve.engines.base import DISPATCH_REASONS, DISPATCH_SOURCES, DispatchInfo  # noqa: E402
from loka_serve.engines.hopper import tuning  # noqa: E402
from loka_serve.engines.hopper.buckets import Buckets  # noqa: E402
from loka_serve.engines.hopper.weights import HopperWeights, pack_weights  # noqa: E402
from loka_serve.errors import EngineError  # noqa: E402
from loka_serve.kernels.dispatch import Dispatch, Entry, Shape  # noqa: E402
from loka_serve.models.config import PRESETS  # noqa: E402
from loka_serve.models.onerec_v2 import OneRecV2  # noqa: E402

BUCKETS = Buckets((1, 8), (16, 512), (64,))


@pytest.fixture(scope="module")
def weights() -> HopperWeights:
    return pack_weights(OneRecV2(PRESETS["tiny"]).initialize(0))


def test_shapes_cover_every_dense_site_at_rows_of_the_grid(weights: HopperWeights) -> None:
    shapes = tuning.shapes_of(weights, BUCKETS)
    assert {shape.rows for shape in shapes} <= set(tuning.ROW_GRID)
    query = {shape.rows for shape in shapes if (shape.n, shape.k, shape.op) == (64, 64, "linear")}
    assert query == {1, 8, 32, 128, 512, 4096}  # 1 and 8 at first, then times 16 and 512
    heads = {shape.rows for shape in shapes if shape.n == 256 and shape.op == "linear_float32"}
    assert heads == query
    assert {shape.rows for shape in shapes if shape.n == 128 and shape.k == 64} >= {128, 1024}  # 65 and 520 slots


def test_a_table_on_file_is_taken_only_if_it_covers_the_shapes(
    weights: HopperWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[set[Shape]] = []

    def measure(shapes: list[Shape], device: torch.device, progress: Callable[[int], object]) -> Dispatch:
        measured.append(set(shapes))
        progress(len(shapes))
        table = Dispatch.unmeasured(device)
        return Dispatch(device, table.environment, {shape: Entry({"reference": 1.0}, None) for shape in shapes})

    monkeypatch.setattr(Dispatch, "measure", measure)
    path, device = tmp_path / "new" / "dispatch.json", torch.device("cpu")
    first = tuning.dispatch_for(weights, BUCKETS, device, path)
    assert measured == [tuning.shapes_of(weights, BUCKETS)] and path.exists()
    assert tuning.dispatch_for(weights, BUCKETS, device, path).entries == first.entries and len(measured) == 1
    tuning.dispatch_for(weights, Buckets((1, 32), (512,), (64,)), device, path)
    assert len(measured) == 2
    path.write_text("{")
    tuning.dispatch_for(weights, BUCKETS, device, path)
    assert len(measured) == 3


def test_where_a_table_is_from_and_why(weights: HopperWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, device = tmp_path / "dispatch.json", torch.device("cpu")
    here = Dispatch.unmeasured(device)

    def measure(shapes: Iterable[Shape], device: torch.device, progress: object = None) -> Dispatch:
        return Dispatch(device, here.environment, {shape: Entry({"reference": 1.0}, None) for shape in shapes})

    def info(buckets: Buckets = BUCKETS) -> DispatchInfo:
        return tuning.traced_dispatch_for(weights, buckets, device, path)[1]

    monkeypatch.setattr(Dispatch, "measure", measure)
    infos = [info(), info(), info(Buckets((1, 32), (512,), (64,)))]
    path.write_text("{")
    infos.append(info())
    elsewhere = dataclasses.replace(here.environment, gpu="another")
    Dispatch(device, elsewhere, measure(tuning.shapes_of(weights, BUCKETS), device).entries).save(path)
    infos.append(info())
    expected = ["no_file", "", "incomplete", "unreadable", "other_environment"]
    assert [info.reason for info in infos] == expected and set(expected) <= set(DISPATCH_REASONS)
    assert [info.source for info in infos] == ["measured", "loaded", "measured", "measured", "measured"]
    assert {info.source for info in infos} <= set(DISPATCH_SOURCES)


def test_a_place_that_cannot_be_written_costs_only_the_file(
    weights: HopperWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Dispatch, "measure", lambda shapes, device, progress: Dispatch.unmeasured(device))
    (tmp_path / "file").write_text("")
    tuning.dispatch_for(weights, BUCKETS, torch.device("cpu"), tmp_path / "file" / "dispatch.json")
    assert "the table is not kept" in caplog.text


@pytest.mark.parametrize("cache", [None, "~no-such-user/cache"])
def test_a_user_without_a_home_costs_only_the_file(
    weights: HopperWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: str | None
) -> None:
    monkeypatch.setattr(Dispatch, "measure", lambda shapes, device, progress: Dispatch.unmeasured(device))
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", _no_entry)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert tuning.default_dispatch_file() is None
    assert tuning.dispatch_for(weights, BUCKETS, torch.device("cpu")).reason == "not measured"
    assert "the table is not kept; set HOME or XDG_CACHE_HOME" in caplog.text


def _no_entry(user: int) -> NoReturn:
    raise KeyError(user)


def test_a_folder_that_may_not_be_looked_into_costs_only_the_file(
    weights: HopperWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Permissions as another user meets them; who runs the tests may be allowed everything."""
    path, system_stat = tmp_path / "closed" / "dispatch.json", os.stat

    def stat(place: Any, *rest: Any, **options: Any) -> os.stat_result:
        if os.fspath(place) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return system_stat(place, *rest, **options)

    def refused(self: Dispatch, place: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    monkeypatch.setattr(Dispatch, "measure", lambda shapes, device, progress: Dispatch.unmeasured(device))
    monkeypatch.setattr(Dispatch, "save", refused)
    monkeypatch.setattr(os, "stat", stat)
    tuning.dispatch_for(weights, BUCKETS, torch.device("cpu"), path)
    assert f"the table is not kept: [Errno {errno.EACCES}] Permission denied: '{path}'" in caplog.text


def complete(weights: HopperWeights, **changes: Any) -> Dispatch:
    """A table of all shapes, measured here but for what is changed of the environment."""
    here = Dispatch.unmeasured("cpu")
    environment = dataclasses.replace(here.environment, **changes)
    return Dispatch(here.device, environment, {shape: Entry({"reference": 1.0}, 2.0) for shape in _shapes(weights)})


def _shapes(weights: HopperWeights) -> set[Shape]:
    return tuning.shapes_of(weights, BUCKETS)


def refuse(shapes: object, device: object, progress: object) -> NoReturn:
    raise AssertionError("measured all the same")


def test_the_bundle_s_own_table_is_read_first_and_never_written(
    weights: HopperWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, kept, device = tmp_path / "bundle.json", tmp_path / "kept.json", torch.device("cpu")
    complete(weights).save(own)
    monkeypatch.setattr(Dispatch, "measure", refuse)
    for frozen in (False, True):
        found, info = tuning.traced_dispatch_for(weights, BUCKETS, device, kept, own, frozen)
        assert info == DispatchInfo("loaded") and found.covers(_shapes(weights)) and not kept.exists()

    complete(weights, driver="570.2").save(own)
    before = own.read_bytes()
    measured = complete(weights)
    monkeypatch.setattr(Dispatch, "measure", lambda shapes, device, progress: measured)
    found, info = tuning.traced_dispatch_for(weights, BUCKETS, device, kept, own)
    assert info == DispatchInfo("measured", "other_environment") and found is measured
    assert own.read_bytes() == before and Dispatch.read(kept).entries == measured.entries
    monkeypatch.setattr(Dispatch, "measure", refuse)  # what is kept serves from now on, frozen too
    assert tuning.traced_dispatch_for(weights, BUCKETS, device, kept, own, True)[1] == DispatchInfo("loaded")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no table: neither"),
        ("{", "own.json is no dispatch table: JSONDecodeError"),
        ("[]", "own.json is no dispatch table: TypeError"),
        ("driver", "own.json was measured elsewhere: driver None here but 570.2 there"),
        ("half", "own.json lacks 1 of the"),
    ],
)
def test_frozen_refuses_what_would_be_measured(
    weights: HopperWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str
) -> None:
    own, kept = tmp_path / "own.json", tmp_path / "kept.json"
    if content == "driver":
        complete(weights, driver="570.2").save(own)
    elif content == "half":
        table = complete(weights)
        entries = dict(table.entries)
        entries.popitem()
        dataclasses.replace(table, entries=entries).save(own)
    elif content is not None:
        own.write_text(content)
    monkeypatch.setattr(Dispatch, "measure", refuse)
    with pytest.raises(EngineError, match="^--frozen-dispatch: ") as caught:
        tuning.traced_dispatch_for(weights, BUCKETS, torch.device("cpu"), kept, own, frozen=True)
    assert message in str(caught.value) and "python -m loka_serve.dispatch measure --bundle" in str(caught.value)
    assert not kept.exists()


def test_weights_that_bf16_would_beat_at_every_number_of_rows_are_named(
    weights: HopperWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(shapes: Iterable[Shape], device: torch.device, progress: object) -> Dispatch:
        slow, mixed = ("linear", "fp8_row", 64, 64), ("linear", "fp8_row", 192, 64)
        entries = {Shape(*key, rows): Entry({"torch": 10.0}, 10.4) for key in (slow, mixed) for rows in (1, 8)}
        entries[Shape(*mixed, 512)] = Entry({"torch": 10.0}, 10.6)
        entries[Shape("linear", "bf16", 64, 64, 8)] = Entry({"torch": 10.0}, 10.0)
        return Dispatch(device, Dispatch.unmeasured(device).environment, entries)

    monkeypatch.setattr(Dispatch, "measure", measure)
    tuning.dispatch_for(weights, BUCKETS, torch.device("cpu"), tmp_path / "kept.json")
    warnings = [record.message for record in caplog.records if "build with --dispatch" in record.message]
    assert warnings == [
        "dispatch: linear [64, 64] in fp8_row is not 1.05x as fast as BF16 at any number of rows: build with --dispatch"
    ]
