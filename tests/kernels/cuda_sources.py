"""Compiling CUDA C++ for Hopper without a GPU; running it is left to tests/gpu."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


def compile_with_nvcc(source: Path, definitions: Iterable[tuple[str, int]], folder: Path) -> str:
    """What the assembler reports; fails the test on an error or a warning."""
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-Werror=all-warnings"]
    macros = [f"-D{name}={value}" for name, value in definitions]
    output = folder / f"{source.stem}.cubin"
    result = subprocess.run(
        [*command, "-Xptxas=-v", *macros, "-o", str(output), str(source)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert output.stat().st_size > 1000
    return result.stderr


def check_asynchronous(report: str, spilled_bytes: int) -> None:
    """The products run asynchronously, and no more than so many bytes are spilled (outside of the loops)."""
    assert "serialized" not in report and "injected" not in report, report
    spills = re.findall(r"(\d+) bytes spill stores", report)
    assert spills and all(int(found) <= spilled_bytes for found in spills), report
