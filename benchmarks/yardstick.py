"""Times an independent implementation of the same model beside ours: a script of someone else's, run as it is.

The script prints a line for each shape, "eager bf16 grouped B8 W512 L3000: 70.0 ms", and one with "graph" for the same
work in a CUDA graph. It runs in a process of its own, so that its memory is free again when ours is measured.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"^(eager|graph)\b.*?\bB(\d+) W(\d+) L(\d+): ([\d.]+) ms", re.MULTILINE)
TIMEOUT_SECONDS = 240.0


class Shape(NamedTuple):
    """Requests, beams a request, and history items a request."""

    batch: int
    beam: int
    context: int


class YardstickTimes(NamedTuple):
    """Milliseconds a batch; None where the script gives no time."""

    eager_ms: float | None = None
    graph_ms: float | None = None


def parse_yardstick(output: str) -> dict[Shape, YardstickTimes]:
    """Times by shape, from the lines that the script prints; other lines are ignored."""
    times: dict[Shape, YardstickTimes] = {}
    for mode, batch, beam, context, milliseconds in LINE.findall(output):
        shape = Shape(int(batch), int(beam), int(context))
        times[shape] = times.get(shape, YardstickTimes())._replace(**{f"{mode}_ms": float(milliseconds)})
    return times


def run_yardstick(path: Path | None, timeout: float = TIMEOUT_SECONDS) -> Mapping[Shape, YardstickTimes]:
    """Run the script at `path`, None for no yardstick. What it printed before a failure or `timeout` seconds counts.

    Raises:
        FileNotFoundError: there is no such script.
        RuntimeError: it gave no time at all; shows the end of its output.
    """
    if path is None:
        return {}
    if not path.is_file():
        raise FileNotFoundError(f"yardstick {path}: expected a Python script")
    try:
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=timeout)
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        output, errors = _text(expired.stdout), _text(expired.stderr)
    times = parse_yardstick(output)
    if not times:
        raise RuntimeError(
            f"yardstick {path}: expected lines of times, its output ends with:\n{(output + errors)[-800:]}"
        )
    return times


def _text(output: str | bytes | None) -> str:
    """A killed process leaves bytes, even where text was asked for."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
