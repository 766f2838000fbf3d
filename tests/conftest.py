"""Shared by all tests: one torch thread (the machine's cores belong to pytest), and the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

SHARED_DATA = Path(os.environ.get("LOKA_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def amazon_industrial() -> Path:
    """MiniOneRec's files of Amazon "Industrial and Scientific"."""
    path = SHARED_DATA / "amazon_industrial"
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set LOKA_TEST_DATA to the folder that holds amazon_industrial/")
    return path
