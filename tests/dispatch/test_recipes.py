"""`auto` with measured speeds: which sites stay BF16, and what the bundle keeps of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from loka_serve import build
from loka_serve.bundle import Bundle
from loka_serve.dispatch.recipes import rows_seen
from loka_serve.dispatch.table import read_table
from loka_serve.engines.hopper.buckets import Buckets
from loka_serve.kernels.dispatch import Shape
from tests.building import CONFIG, build_arguments
from tests.dispatch.tables import table

BUCKETS = Buckets((1, 8), (16, 512), (64,))


def test_rows_that_a_site_sees() -> None:
    assert rows_seen("context.projection", BUCKETS) == (65, 520)
    assert rows_seen("heads.0", BUCKETS) == (1, 8)
    assert rows_seen("heads.1", BUCKETS) == (16, 128, 512, 4096)
    assert rows_seen("layers.0.cross_attention.query", BUCKETS) == (1, 8, 16, 128, 512, 4096)


def us(shape: Shape) -> float:
    """fp8_block is the fastest for q, k and v; their output gains too little; experts gain; heads lose."""
    if shape.op == "experts":
        return 5.0
    if shape.op == "linear_float32":
        return 12.0
    if (shape.n, shape.k) == (192, 64):
        return 4.0 if shape.recipe == "fp8_block" else 6.0
    return 9.7 if (shape.n, shape.k) == (64, 64) else 6.0


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speeds")
    table(CONFIG, us).save(folder / "speeds.json")
    options = ("--dispatch", str(folder / "speeds.json"), "--min-top-k-overlap", "0", "--quiet", "--mods", "none")
    assert build.main(build_arguments(folder, *options)) == 0
    return folder / "bundle"


def test_auto_takes_the_fastest_within_bounds_and_bf16_without_a_gain(built: Path) -> None:
    bundle = Bundle.load(built)
    sites = {site["name"]: site for site in bundle.probe["sites"]}
    recipes = bundle.plan.recipes
    assert recipes["layers.1.self_attention.qkv"] == "fp8_block"
    assert "2.50x the speed of BF16" in sites["layers.1.self_attention.qkv"]["choice"]["reason"]
    output = sites["layers.1.self_attention.output"]
    assert recipes["layers.1.self_attention.output"] == "bf16" and output["weight_bytes"] == output["bf16_bytes"]
    assert "fp8_row: 1.03x the speed of BF16 is not above 1.05x" in output["choice"]["reason"]
    for name in ("layers.1.moe.gate_up", "layers.1.moe.down"):
        assert recipes[name] == "fp8_block" and "2.00x the speed" in sites[name]["choice"]["reason"]
    assert {recipes[name] for name in recipes if name.startswith("heads.")} == {"bf16"}


def test_the_table_and_its_speeds_are_part_of_the_bundle(built: Path) -> None:
    assert read_table(built).entries == table(CONFIG, us).entries
    assert "dispatch.json" in Bundle.load(built).manifest["files"]
    cells = json.loads((built / "report.json").read_text())["speed"]["cells"]
    qkv = next(cell for cell in cells if cell["site"] == "layers.1.self_attention.qkv" and cell["rows"] == 512)
    assert (qkv["recipe"], qkv["us"], qkv["bf16_us"], qkv["mere"]) == ("fp8_block", 4.0, 10.0, 0.08)
    assert any(cell["site"] == "layers.1.moe.down" for cell in cells)


def test_a_recipe_that_was_asked_for_stays_and_unknown_sites_keep_theirs(tmp_path: Path) -> None:
    slow = table(CONFIG, lambda shape: 20.0)
    slow.save(tmp_path / "speeds.json")
    options = ("--dispatch", str(tmp_path / "speeds.json"), "--min-top-k-overlap", "0", "--quiet")
    assert build.main(build_arguments(tmp_path, *options, "--recipe", "fp8_row")) == 0
    recipes = Bundle.load(tmp_path / "bundle").plan.recipes
    assert recipes["layers.1.self_attention.qkv"] == "fp8_row"
    dataclasses.replace(slow, entries={}).save(tmp_path / "speeds.json")
    assert build.main(build_arguments(tmp_path, *options)) == 0
    recipes = Bundle.load(tmp_path / "bundle").plan.recipes
    assert recipes["layers.1.self_attention.qkv"] == "fp8_row"  # auto, by errors alone


def test_a_damaged_table_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "speeds.json").write_text('{"environment": 3}')
    arguments = build_arguments(tmp_path, "--dispatch", str(tmp_path / "speeds.json"))
    (tmp_path / "checkpoint" / "config.json").unlink()  # what would be found missing later
    assert build.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "speeds.json is no dispatch table: TypeError" in error
