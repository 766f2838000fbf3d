"""The CUDA kernels of radix top-k, run on the host by emulation.cpp, against the reference."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loka_serve.kernels.radix_topk.cuda import SOURCE, Configuration
from loka_serve.kernels.radix_topk.reference import radix_topk as reference

# Small blocks: the logic does not depend on the sizes, the emulator's time does.
CONFIGURATIONS = (
    Configuration(threads=64, items=8, capacity=128, blocks_per_sm=1, log2_bins=8),
    Configuration(threads=32, items=16, capacity=128, blocks_per_sm=1, log2_bins=6, group=8, resident=False),
)
MAX_K = 64
ROOM = 300

INPUTS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray[Any, Any]]] = {
    "normal": lambda generator, rows, columns: generator.normal(size=(rows, columns)),
    "few distinct values": lambda generator, rows, columns: generator.integers(-1, 2, (rows, columns)) * 1.0,
    "all equal": lambda generator, rows, columns: np.full((rows, columns), -2.5),
    "mostly minus infinity": lambda generator, rows, columns: np.where(
        generator.random((rows, columns)) < 0.05, generator.normal(size=(rows, columns)), -np.inf
    ),
    "ascending": lambda generator, rows, columns: np.tile(np.arange(columns) * 1.0, (rows, 1)),
    "descending": lambda generator, rows, columns: np.tile(-np.arange(columns) * 1.0, (rows, 1)),
    "signed zeros": lambda generator, rows, columns: np.where(generator.random((rows, columns)) < 0.5, 0.0, -0.0),
    "clustered": lambda generator, rows, columns: np.where(
        np.arange(columns) // 4 < 12, 5.0 + generator.random((rows, columns)), generator.random((rows, columns))
    ),
    "across zero": lambda generator, rows, columns: generator.normal(size=(rows, columns)) * 2 - 4,
    "one far above": lambda generator, rows, columns: np.where(
        np.arange(columns) == columns // 2, 3e38, generator.normal(size=(rows, columns))
    ),
    "infinity above, masked far below": lambda generator, rows, columns: np.where(
        generator.random((rows, columns)) < 0.8, -1e30, np.where(generator.random((rows, columns)) < 0.02, np.inf, 1.0)
    ),
    "next to zero": lambda generator, rows, columns: generator.integers(-9, 9, (rows, columns)) * 1e-45,
    "huge range": lambda generator, rows, columns: (
        np.where(generator.random((rows, columns)) < 0.5, -1.0, 1.0)
        * np.exp(generator.normal(size=(rows, columns)).clip(-3, 3) * 28)
    ),
    "a few finite": lambda generator, rows, columns: np.where(
        generator.permuted(np.tile(np.arange(columns), (rows, 1)), axis=1) < 40,
        generator.normal(size=(rows, columns)),
        -np.inf,
    ),
    "all minus infinity": lambda generator, rows, columns: np.full((rows, columns), -np.inf),
    "all nan": lambda generator, rows, columns: np.full((rows, columns), np.nan),
    "more infinity than wanted": lambda generator, rows, columns: np.where(
        generator.random((rows, columns)) < 0.3, np.inf, generator.normal(size=(rows, columns))
    ),
    "sample misled": lambda generator, rows, columns: np.where(
        np.arange(columns) % 32 < 16, generator.normal(size=(rows, columns)), 9 + generator.random((rows, columns))
    ),
    "sample misled upwards": lambda generator, rows, columns: np.where(
        np.arange(columns) < 32, 9.0 + np.arange(columns), np.arange(columns) % 7.0
    ),
    "nan and infinity": lambda generator, rows, columns: np.where(
        generator.random((rows, columns)) < 0.02, np.nan, np.exp(generator.normal(size=(rows, columns)) * 20)
    ),
}


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=("fours", "eights"))
def emulator(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    library = tmp_path_factory.mktemp("emulator") / "radix_topk.so"
    definitions = [f"-D{name}={value}" for name, value in request.param.definitions()]
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f'-DSOURCE="{SOURCE}"', *definitions]
    source = Path(__file__).with_name("emulation.cpp")
    result = subprocess.run([*command, "-o", str(library), str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def assert_equals_reference(
    emulator: ctypes.CDLL, scores: np.ndarray[Any, Any], k: int, row_k: np.ndarray[Any, Any] | None, rank: int | None
) -> None:
    """rank None: short rows. Otherwise long rows whose threshold is the rank-th sample; 0 skips the sample."""
    rows, columns = scores.shape
    scores = np.ascontiguousarray(scores, dtype=np.float32)
    values, indices = np.full((rows, k), 7e7, np.float32), np.full((rows, k), 12345, np.int32)  # poison
    ragged = np.zeros(rows, np.int32) if row_k is None else row_k.astype(np.int32)
    common = [pointer(scores), rows, columns, columns, k, pointer(ragged), int(row_k is not None)]
    if rank is None:
        emulator.short_rows(*common, pointer(values), pointer(indices))
    else:
        thresholds, counts = np.full(rows, 99, np.uint32), np.zeros(rows, np.uint32)
        collected = np.full((rows, ROOM), 2**64 - 1, np.uint64)
        buffers = [pointer(thresholds), pointer(counts), pointer(collected), ROOM]
        emulator.long_rows(*common, rank, 2048, *buffers, pointer(values), pointer(indices))
    wanted = np.full(rows, k) if row_k is None else np.clip(row_k, 0, k)
    expected_values, expected_indices = reference(torch.from_numpy(scores), torch.from_numpy(wanted.astype(np.int64)))
    width = expected_values.shape[1]
    np.testing.assert_array_equal(indices[:, :width], expected_indices.numpy())
    np.testing.assert_array_equal(values[:, :width], expected_values.numpy())
    assert (indices[:, width:] == -1).all() and (values[:, width:] == -np.inf).all()


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("columns", [1, 5, 130, 509, 512])
def test_short_rows(emulator: ctypes.CDLL, name: str, columns: int) -> None:
    scores = INPUTS[name](np.random.default_rng(columns), 3, columns) * np.ones((3, 1))
    for k in (1, 7, MAX_K):
        assert_equals_reference(emulator, scores, k, None, rank=None)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("rank", [0, 12])
def test_long_rows(emulator: ctypes.CDLL, name: str, rank: int) -> None:
    scores = INPUTS[name](np.random.default_rng(rank), 2, 6001) * np.ones((2, 1))
    for k in (1, MAX_K):
        assert_equals_reference(emulator, scores, k, None, rank)


def test_ragged_k(emulator: ctypes.CDLL) -> None:
    scores = np.random.default_rng(0).normal(size=(6, 400))
    row_k = np.array([0, 1, MAX_K, 33, -4, 1000])
    assert_equals_reference(emulator, scores, MAX_K, row_k, rank=None)
    assert_equals_reference(emulator, np.random.default_rng(1).normal(size=(6, 3000)), MAX_K, row_k, rank=12)
