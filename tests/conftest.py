"""Shared by all tests: one torch thread, Triton's interpreter where there is no GPU, and the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Read when a kernel is decorated, that is, when the first test module imports it.
    os.environ["TRITON_INTERPRET"] = "1"

SHARED_DATA = Path(os.environ.get("LOKA_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def amazon_industrial() -> Path:
    """MiniOneRec's files of Amazon "Industrial and Scientific"."""
    path = SHARED_DATA / "amazon_industrial"
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set LOKA_TEST_DATA to the folder that holds amazon_industrial/")
    return path
