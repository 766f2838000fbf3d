"""The CUDA source compiles for Hopper in every configuration in use; running it is left to tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_serve.kernels.radix_topk.cuda import COLLECT, LONG_ROWS, SHORT_ROWS, SOURCE, Configuration
from loka_serve.kernels.radix_topk.sweep import CANDIDATES
from tests.kernels.cuda_sources import compile_with_nvcc, needs_nvcc


@needs_nvcc
@pytest.mark.parametrize("configuration", sorted({*SHORT_ROWS, *CANDIDATES, LONG_ROWS, COLLECT}, key=str), ids=str)
def test_compiles_for_hopper(configuration: Configuration, tmp_path: Path) -> None:
    compile_with_nvcc(SOURCE, configuration.definitions(), tmp_path)
