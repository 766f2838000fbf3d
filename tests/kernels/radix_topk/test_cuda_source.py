"""The CUDA source compiles for Hopper in every configuration in use; running it is left to tests/gpu."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from loka_serve.kernels.radix_topk.cuda import COLLECT, LONG_ROWS, SHORT_ROWS, SOURCE, Configuration
from loka_serve.kernels.radix_topk.sweep import CANDIDATES


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("configuration", sorted({*SHORT_ROWS, *CANDIDATES, LONG_ROWS, COLLECT}, key=str), ids=str)
def test_compiles_for_hopper(configuration: Configuration, tmp_path: Path) -> None:
    definitions = [f"-D{name}={value}" for name, value in configuration.definitions()]
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-Werror=all-warnings"]
    output = tmp_path / "radix_topk.cubin"
    result = subprocess.run(
        [*command, *definitions, "-o", str(output), str(SOURCE)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert output.stat().st_size > 1000
