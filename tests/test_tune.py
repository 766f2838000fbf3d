"""Batch tuning: what is swept and chosen, and what it leaves in the bundle."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import xml.etree.ElementTree
from pathlib import Path
from typing import cast

import pytest

from loka_serve import build
from loka_serve.bundle import Bundle, add_files
from loka_serve.config import ServerConfig
from loka_serve.errors import BundleError, TuningError
from loka_serve.server.state import served_model, with_tuned
from loka_serve.tune import DRAWING_FILE, EXIT_BOUND, EXIT_ERROR, grid_of, main
from loka_serve.tuning.config import TuneConfig
from loka_serve.tuning.load import Load, Point, Setting
from loka_serve.tuning.sweep import Bounds, Grid, Tuning, frontier, tune
from tests.building import build_arguments


class ModelledLoad:
    """An engine on paper: a batch of b with beam w takes (4 + b) x w / 10 ms, and a lone request the delay too."""

    def __init__(self) -> None:
        self.measured: list[tuple[Setting, str]] = []

    async def closed(self, setting: Setting, clients: int, seconds: float, bound_ms: float) -> Point:
        self.measured.append((setting, f"{clients} clients"))
        batch = min(clients, setting.max_batch)
        milliseconds = (4 + batch) * setting.beam_width / 10
        waited = setting.max_delay_ms if clients < setting.max_batch else 0.0
        rounds = -(-clients // batch)
        p99 = milliseconds * rounds + waited
        return Point(setting, f"{clients} clients", 100, 1000 * clients / p99, p99, p99, batch)

    async def open(self, setting: Setting, per_second: float, seconds: float) -> Point:
        self.measured.append((setting, f"{per_second:.0f}/s"))
        full = (4 + setting.max_batch) * setting.beam_width / 10
        load = per_second * full / 1000 / setting.max_batch
        p99 = full * (1 + load) + setting.max_delay_ms
        return Point(setting, "arrivals", 100, per_second, p99, p99, setting.max_batch * load)


GRID = Grid((1, 2, 4, 8, 16, 32), (0.0, 2.0), (40, 10))


def tuned(bounds: Bounds, grid: Grid = GRID) -> tuple[Tuning, ModelledLoad]:
    load = ModelledLoad()
    return asyncio.run(tune(cast(Load, load), grid, bounds, 1.0)), load


def test_the_widest_beam_within_the_bound_is_chosen() -> None:
    # Beam 40: a batch of 8 takes 48 ms and keeps 70 ms up to a load of .458; 16 takes 80 ms and cannot.
    tuning, _ = tuned(Bounds(p99_ms=70))
    assert tuning.chosen.setting.beam_width == 40 and tuning.chosen.p99_ms <= 70
    assert {point.setting.beam_width for point in tuning.points} == {40}  # narrower ones need no measuring


def test_a_narrower_beam_where_the_wider_one_is_too_slow() -> None:
    # Beam 40 takes 20 ms alone.
    tuning, _ = tuned(Bounds(p99_ms=19))
    assert tuning.chosen.setting.beam_width == 10
    tuning, _ = tuned(Bounds(p99_ms=70, min_requests_per_second=400))
    assert tuning.chosen.setting.beam_width == 10 and tuning.chosen.requests_per_second >= 400


def test_batches_grow_until_one_alone_is_too_slow() -> None:
    _, load = tuned(Bounds(p99_ms=30), Grid((1, 2, 4, 8, 16), (0.0,), (40,)))
    # Batch 2 takes 24 ms, 4 takes 32 ms with four clients but 24 ms with two; 8 has 32 ms with its four.
    assert [setting.max_batch for setting, what in load.measured if "clients" in what] == [1, 1, 2, 2, 2, 4, 4, 8]


def test_a_batch_of_one_has_one_delay() -> None:
    assert GRID.settings == (1 + 5 * 2) * 2
    tuning, _ = tuned(Bounds(p99_ms=1000))
    assert {point.setting.max_delay_ms for point in tuning.points if point.setting.max_batch == 1} == {0.0}


def test_what_no_setting_meets_is_an_error_that_says_what_came_closest() -> None:
    with pytest.raises(TuningError, match=r"no setting reaches a p99 of at most 3 ms; nearest: .* beam 10 .* p99 5 ms"):
        tuned(Bounds(p99_ms=3))
    with pytest.raises(TuningError, match=r"at 1e\+06 requests/s or more; nearest: .*ask for fewer requests/s"):
        tuned(Bounds(p99_ms=100, min_requests_per_second=1e6))


def test_the_frontier_holds_what_nothing_beats() -> None:
    def point(p99_ms: float, rate: float) -> Point:
        return Point(Setting(1, 0.0, 1), "", 1, rate, p99_ms, p99_ms, 1.0)

    points = [point(10, 100), point(5, 50), point(10, 90), point(20, 100), point(30, 300), point(5, 40)]
    assert [(entry.p99_ms, entry.requests_per_second) for entry in frontier(points)] == [(5, 50), (10, 100), (30, 300)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    assert build.main(build_arguments(folder, "--recipe", "fp8_row")) == 0
    return folder / "bundle"


FAST = ("--seconds", "0.05", "--device", "cpu", "--cpu-threads", "1", "--delays-ms", "1")


def test_tuning_a_bundle_on_the_reference_engine(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A minute is met by whatever machine runs this, so only the sweep itself decides what is left.
    histories = str(bundle.parent / "histories.jsonl")
    flags = ("--p99-ms", "60000", "--batches", "1,3", "--beams", "8,4", "--histories", histories)
    assert main(["--bundle", str(bundle), *flags, *FAST]) == 0
    output, progress = capsys.readouterr()
    serving = json.loads((bundle / "serving.json").read_text())
    assert serving["chosen"]["beam_width"] == 8 and serving["chosen"]["engine"] == "reference"
    assert serving["chosen"]["max_batch"] in (1, 3) and serving["histories"] == "histories.jsonl"
    loads = {(point["setting"]["max_batch"], point["load"]) for point in serving["points"]}
    assert loads >= {(1, "1 clients"), (1, "2 clients"), (3, "1 clients"), (3, "3 clients"), (3, "6 clients")}
    assert all(0 < point["p50_ms"] <= point["p99_ms"] and point["requests"] >= 1 for point in serving["points"])
    full = next(p for p in serving["points"] if (p["setting"]["max_batch"], p["load"]) == (3, "6 clients"))
    assert 2 < full["mean_batch"] <= 3  # six clients always fill a batch of three, but for the first and the last
    assert output.startswith(f"{bundle}: --max-batch ") and "starting the reference engine" in progress
    xml.etree.ElementTree.fromstring((bundle / DRAWING_FILE).read_text())

    loaded = Bundle.load(bundle)  # every checksum fits
    assert {"serving.json", "tuning.svg"} <= set(loaded.manifest["files"])
    config = with_tuned(ServerConfig(bundle), loaded)
    model = served_model(config, loaded)
    assert (model.max_batch, model.beam_width) == (serving["chosen"]["max_batch"], 8) and config.max_delay_ms == 1
    by_hand = with_tuned(ServerConfig(bundle, max_batch=7, max_delay_ms=0.0, beam_width=5), loaded)
    assert (by_hand.max_batch, by_hand.max_delay_ms, by_hand.beam_width) == (7, 0.0, 5)
    other = with_tuned(ServerConfig(bundle, engine="hopper"), loaded)
    assert (other.max_batch, other.max_delay_ms, other.beam_width) == (0, None, 0)


def test_a_bound_that_is_not_met_leaves_the_bundle_as_it_was(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}
    assert main(["--bundle", str(bundle), "--p99-ms", "0.01", "--batches", "1", "--beams", "4", *FAST]) == EXIT_BOUND
    assert "error: no setting reaches a p99 of at most 0.01 ms; nearest: batch 1" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--p99-ms", "0"), "--p99-ms: expected a number from 0.01"),
        (("--batches", "1,1"), "--batches: expected different whole numbers from 1 to 4096 with commas between"),
        (("--delays-ms", "2,nan"), "--delays-ms: expected different numbers from 0 to 10000"),
        (("--beams", "0"), "--beams: expected different whole numbers from 1"),
        (("--beams", "151"), "--beams 151: expected at most the catalog's 150 items"),
        (("--histories", "nowhere"), "--histories: expected an existing file"),
        (("--engine", "hopper"), "the engine does not start: "),
    ],
)
def test_bad_settings(bundle: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert main(["--bundle", str(bundle), "--p99-ms", "70", *FAST, *flags]) == EXIT_ERROR
    assert f"error: {message}" in capsys.readouterr().err


def test_the_grid_follows_the_bundle(bundle: Path) -> None:
    grid = grid_of(TuneConfig(bundle, 70.0), Bundle.load(bundle))
    assert grid == Grid((1, 2, 4, 8, 16, 32), (0.0, 2.0, 5.0), (16, 8, 4))


def test_damaged_settings_name_file_and_field(bundle: Path) -> None:
    good = {"engine": "reference", "max_batch": 4, "max_delay_ms": 2.0, "beam_width": 8}
    loaded = Bundle.load(bundle)
    damages: list[tuple[object, str]] = [
        ([], "expected an object"),
        ({"chosen": {**good, "max_batch": 0}}, "max_batch: expected a whole number"),
        ({"chosen": {**good, "max_batch": True}}, "max_batch: expected a whole number"),
        ({"chosen": {**good, "max_delay_ms": -1}}, "max_delay_ms: expected a number"),
        ({"chosen": {**good, "beam_width": "8"}}, "beam_width: expected a whole number"),
        ({"chosen": {**good, "engine": None}}, "engine: expected a name"),
    ]
    for content, message in damages:
        add_files(bundle, {"serving.json": json.dumps(content).encode()})
        with pytest.raises(BundleError, match=f"serving.json: {message}"):
            with_tuned(ServerConfig(bundle), loaded)
    add_files(bundle, {"serving.json": json.dumps({"chosen": good}).encode()})
    assert dataclasses.asdict(with_tuned(ServerConfig(bundle), loaded))["max_batch"] == 4
