"""python -m loka_serve.dispatch: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from loka_serve import build
from loka_serve.bundle import Bundle
from loka_serve.command_line import run_command_line
from loka_serve.dispatch import __main__ as module
from loka_serve.dispatch.table import read_table, rows_of
from loka_serve.kernels.dispatch import Dispatch, Entry, Shape
from loka_serve.models.config import PRESETS
from tests.building import build_arguments
from tests.dispatch.tables import H200, table

TINY = PRESETS["tiny"]
MADE = table(TINY, lambda shape: {"fp8_row": 6.0, "fp8_block": 7.0, "fp8_tensor": 1.0}[shape.recipe])


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as caught:
        run_command_line(lambda: module.main(arguments))
    output, error = capsys.readouterr()
    assert caught.value.code == 2 and not output and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_rows_have_the_rule_s_choice() -> None:
    rows = {(row.site, row.rows): row for row in rows_of(MADE)}
    heads = rows["heads.*", 512]
    assert (heads.choice, heads.library, heads.recipe, heads.us, heads.bf16_us) == (
        "torch",
        "cublaslt",
        "fp8_row",
        6.0,
        10.0,
    )
    # One scale a tensor is faster, and not served.
    assert heads.runner_up == "torch fp8_block 7"
    assert heads.mere == 0.08 and heads.reason.startswith("1.67x the speed of BF16")
    experts = next(row for (site, count), row in rows.items() if "moe.gate_up" in site and count == 1)
    assert (experts.choice, experts.recipe, experts.library) == ("Tiling(16)", "fp8_block", "triton")
    assert {row.recipe for row in rows_of(table(TINY, lambda shape: 9.8))} == {"bf16"}
    assert {row.recipe for row in rows_of(table(TINY, lambda shape: 1.0, mere=0.3))} == {"bf16"}


def test_a_table_of_one_recipe_shows_its_own_fastest() -> None:
    entries = {Shape("linear", "fp8_row", 8, 4, 2): Entry({"torch_fast": 3.0, "torch": 4.0}, 2.0)}
    (row,) = rows_of(dataclasses.replace(MADE, entries=entries, sites={}))
    assert (row.site, row.choice, row.bf16_us, row.runner_up) == ("linear [8, 4]", "torch_fast", 2.0, "torch fp8_row 4")
    assert row.reason == "the weights are in this recipe"


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MADE.save(tmp_path / "dispatch.json")
    module.main(["show", str(tmp_path / "dispatch.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured with gpu NVIDIA H200, driver 580.1")
    assert "  fbgemm: absent: No module named 'fbgemm_gpu'" in lines
    heading = lines[3].split()
    assert heading == ["site", "rows", "choice", "library", "recipe", "us", "bf16_us", "mere", "runner_up"]
    assert len(lines) == 4 + len(MADE.cells())
    module.main(["show", str(tmp_path), "--json"])  # a folder that has one
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records == [row.to_dict() for row in rows_of(MADE)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "dispatch.json: No such file or directory: expected a dispatch table"),
        ("{", "dispatch.json is no dispatch table: JSONDecodeError"),
        ('{"environment": {}, "entries": []}', "dispatch.json is no dispatch table: TypeError"),
        ("\x00\xff", "dispatch.json is no dispatch table: "),
    ],
)
def test_a_damaged_table_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "dispatch.json").write_bytes(content.encode("latin-1"))
    assert message in failure(capsys, "show", str(tmp_path / "dispatch.json"))


def test_wrong_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = str(tmp_path / "out.json")
    measure = ("measure", "--preset", "tiny", "--device", "cpu")
    assert "the following arguments are required: command" in failure(capsys)
    assert "one of the arguments --preset --checkpoint --bundle is required" in failure(capsys, "measure", "--out", out)
    assert "--out: expected a file with --preset or --checkpoint" in failure(capsys, *measure)
    assert "and none with --bundle" in failure(capsys, "measure", "--bundle", "x", "--out", out, "--device", "cpu")
    assert "--device cpu: dispatch is measured on a CUDA device" in failure(capsys, *measure, "--out", out)
    assert "dispatch is measured on a CUDA device, and none is here" in failure(capsys, *measure[:3], "--out", out)
    assert "argument --rows: expected a whole number from 1, got '0'" in failure(capsys, *measure, "--rows", "0")
    assert "argument --preset: invalid choice: 'huge'" in failure(capsys, "measure", "--preset", "huge")
    assert "nowhere" in failure(capsys, "measure", "--checkpoint", "nowhere", "--out", out, "--device", "cpu")
    assert "nowhere: not a bundle" in failure(capsys, "measure", "--bundle", "nowhere", "--device", "cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """As if a GPU were here on which every shape takes a microsecond."""
    asked: list[Shape] = []

    def measure(
        shapes: Sequence[Shape], device: str, progress: Callable[[int], object], enough: Callable[[], bool]
    ) -> Dispatch:
        asked.extend(shapes)
        entries = {shape: Entry({"torch": 1.0}, 1.0, {"torch": 0.08}) for shape in shapes if not enough()}
        return dataclasses.replace(MADE, entries=entries, sites={})

    monkeypatch.setattr(Dispatch, "measure", measure)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return asked


def test_measure_of_a_preset(measured: list[Shape], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out.json"
    module.main(["measure", "--preset", "tiny", "--out", str(out), "--rows", "8", "64", "--recipes", "bf16", "fp8_row"])
    written = read_table(out)
    assert set(written.entries) == set(measured) and written.environment == H200
    assert {shape.rows for shape in measured} == {8, 64} and {shape.recipe for shape in measured} == {"bf16", "fp8_row"}
    assert "heads.*" in written.sites.values()
    assert capsys.readouterr().out == f"{out}: {len(measured)} shapes in their recipes\n"


def test_what_there_was_no_time_for_is_said(
    measured: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    out = tmp_path / "out.json"
    module.main(["measure", "--preset", "tiny", "--out", str(out), "--seconds", "3"])
    assert len(read_table(out).entries) == 3  # the fourth is asked for a second too late
    assert f"; {len(measured) - 3} of {len(measured)} were not measured" in capsys.readouterr().out


def test_measure_of_a_bundle_becomes_part_of_it(
    measured: list[Shape], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    assert build.main(build_arguments(tmp_path, "--min-top-k-overlap", "0", "--quiet")) == 0
    module.main(["measure", "--bundle", str(bundle)])
    loaded = Bundle.load(bundle)  # every checksum, that of the table and of the report included
    assert "dispatch.json" in loaded.manifest["files"]
    assert set(read_table(bundle).entries) == set(measured)
    assert {shape.rows for shape in measured} >= {16384, 32768}  # as far as the engine asks
    report: dict[str, Any] = json.loads((bundle / "report.json").read_text())
    assert report["speed"]["measured"] and {cell["library"] for cell in report["speed"]["cells"]} == {"torch"}
    assert str(bundle / "dispatch.json") in capsys.readouterr().out
