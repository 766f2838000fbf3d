"""Arguments of the benchmarks: what is wrong with them is said in one line, before anything is measured."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from loka_serve.command_line import run_command_line

REQUIRED = {
    "engine": [],
    "kernels": [],
    "ablation": [],
    "dispatch": [],
    "serving": [],
    "agreement": ["--bundle", "bundle", "--histories", __file__],
}


def error_of(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """The one line that the command ends with, as if a GPU were here that must not be used."""

    def used(*arguments: object, **options: object) -> None:
        raise AssertionError("measured all the same")

    module = importlib.import_module(f"benchmarks.{benchmark}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in ("measure", "measure_ceilings", "copy_bandwidth", "run_yardstick"):
        monkeypatch.setattr(module, name, used, raising=False)
    monkeypatch.setattr("sys.argv", [benchmark, *REQUIRED[benchmark], *arguments])
    with pytest.raises(SystemExit) as caught:
        run_command_line(module.main)
    output, error = capsys.readouterr()
    assert caught.value.code == 2 and not output and error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("benchmark", list(REQUIRED))
def test_a_result_that_cannot_be_written_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], benchmark: str
) -> None:
    (tmp_path / "file").write_text("")
    for out, problem in ((tmp_path, "it is a folder"), (tmp_path / "file" / "out.json", "file is no folder")):
        error = error_of(benchmark, monkeypatch, capsys, "--out", str(out))
        assert f"argument --out: expected a file that can be written, got '{out}': " in error and problem in error


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (
            "engine",
            ["--only", "int8/*"],
            "error: --only: expected patterns of names like fp8/b8/w512/c3000/none, no row",
        ),
        ("engine", ["--seconds", "nan"], "error: argument --seconds: expected a number of seconds above 0, got 'nan'"),
        ("engine", ["--yardstick", "nowhere"], "error: argument --yardstick: expected an existing file, got 'nowhere'"),
        ("engine", ["--keep", "nowhere"], "error: argument --keep: expected an existing file, got 'nowhere'"),
        ("dispatch", ["--rows", "0"], "error: argument --rows: expected a whole number from 1, got '0'"),
        ("dispatch", ["--budget", "nan"], "error: argument --budget: expected a number of seconds above 0, got 'nan'"),
        ("dispatch", ["--preset", "huge"], "error: argument --preset: invalid choice: 'huge'"),
        ("kernels", ["--only", "fft"], "error: argument --only: invalid choice: 'fft'"),
        ("ablation", ["--seconds", "0"], "error: argument --seconds: expected a number of seconds above 0, got '0'"),
        ("agreement", ["--rows", "0"], "error: argument --rows: expected a whole number from 1, got '0'"),
        ("agreement", [], "error: bundle: "),
    ],
)
def test_a_bad_argument_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    benchmark: str,
    arguments: list[str],
    message: str,
) -> None:
    out = tmp_path / "out.json"
    assert error_of(benchmark, monkeypatch, capsys, "--out", str(out), *arguments).startswith(message)
    assert not out.exists()


@pytest.mark.parametrize("benchmark", list(REQUIRED))
def test_a_machine_without_a_gpu_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], benchmark: str
) -> None:
    module = importlib.import_module(f"benchmarks.{benchmark}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [benchmark, *REQUIRED[benchmark], "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as caught:
        run_command_line(module.main)
    assert caught.value.code == 2 and "CUDA device, and none is here" in capsys.readouterr().err
