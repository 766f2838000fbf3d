"""Lines of the yardstick become times by shape; a script runs in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.yardstick import Shape, YardstickTimes, parse_yardstick, run_yardstick

OUTPUT = """some warning
eager bf16 grouped B1 W512 L3000: 35.2 ms  28 req/s
graph bf16 grouped B1 W512 L3000: 16.9 ms 59 req/s
eager bf16 grouped B8 W128 L512: 70.0 ms  114 req/s
graph fail RuntimeError('B8 W128')
"""


def test_parse() -> None:
    assert parse_yardstick(OUTPUT) == {
        Shape(1, 512, 3000): YardstickTimes(35.2, 16.9),
        Shape(8, 128, 512): YardstickTimes(70.0, None),
    }


def test_runs_a_script_and_keeps_what_it_printed_before_it_failed(tmp_path: Path) -> None:
    script = tmp_path / "yardstick.py"
    script.write_text("print('eager bf16 grouped B1 W512 L3000: 35.2 ms  28 req/s', flush=True)\nraise SystemExit(1)\n")
    assert run_yardstick(script) == {Shape(1, 512, 3000): YardstickTimes(35.2)}


def test_a_script_that_hangs_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "yardstick.py"
    script.write_text(
        "import time\nprint('graph bf16 grouped B1 W512 L3000: 9.5 ms 1 req/s', flush=True)\ntime.sleep(60)\n"
    )
    assert run_yardstick(script, timeout=2.0) == {Shape(1, 512, 3000): YardstickTimes(None, 9.5)}


def test_no_script_no_times(tmp_path: Path) -> None:
    assert run_yardstick(None) == {}
    with pytest.raises(FileNotFoundError):
        run_yardstick(tmp_path / "missing.py")
    script = tmp_path / "broken.py"
    script.write_text("raise ImportError('no torch here')\n")
    with pytest.raises(RuntimeError, match="no torch here"):
        run_yardstick(script)
