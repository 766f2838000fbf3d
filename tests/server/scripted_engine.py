"""An engine process whose engine does as the newest history item says: faults that no real engine has on demand.

Run as `python -m tests.server.scripted_engine`. It imports no torch, so a server with it is up within a second; with
`--stitched` it does, and computes what it answers.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import BeamResult, DispatchInfo, Engine, EngineLimits, RequestBatch
from loka_serve.errors import EngineError
from loka_serve.server.engine_process import add_connection_arguments, serve

# First code of the newest history item -> what happens. Codes below FIRST_COMMAND do nothing.
FIRST_COMMAND = 200
NAN, INVALID_LEAF, DOUBLE_LEAF, RAISE, DIE, HANG, SLOW = range(200, 207)
SLOW_SECONDS = 0.5
# Begin of a catalog's first item -> what happens in the swap to it.
REFUSED, BROKEN, LOST, SLOWLY, NEVER = "refused", "broken", "lost", "slowly", "never"
SWAP_SECONDS = 2.5  # longer than the batch timeout of the tests


def command(code: int) -> list[list[int]]:
    """A `history_sids` that makes the engine do something."""
    return [[1, 1, 1], [code, 0, 0]]


class ScriptedEngine:
    """Ranks the allowed leaves in their order; leaf n of a request scores -0.25 * (n + history length)."""

    name = "scripted"
    dispatch_info = DispatchInfo("measured", "other_environment")

    def __init__(self, catalog: Catalog, limits: EngineLimits, seconds: float = 0.0) -> None:
        self.catalog = catalog
        self.limits = limits
        self.seconds = seconds
        self.batch_sizes: list[int] = []
        self.swaps: list[str] = []

    def warmup(self) -> None:
        time.sleep(self.seconds)

    def swap_catalog(self, catalog: Catalog) -> None:
        obey_catalog(catalog)
        self.catalog = catalog
        self.swaps.append(catalog.version)

    def recommend(self, batch: RequestBatch) -> BeamResult:
        self.batch_sizes.append(len(batch))
        time.sleep(self.seconds)
        codes = [int(request.history[-1, 0]) if len(request.history) else 0 for request in batch.requests]
        for code in codes:
            obey(code)
        leaves, scores = self.rank(batch)
        failed = np.array([code == NAN for code in codes])
        for row, code in enumerate(codes):
            if code == INVALID_LEAF:
                leaves[row, 0] = self.catalog.trie.leaf_count
            if code == DOUBLE_LEAF:
                leaves[row, 1] = leaves[row, 0]
        counts = (leaves >= 0).sum(1).astype(np.int32)
        return BeamResult(leaves, scores, counts, failed, {"decode": self.seconds})

    def rank(self, batch: RequestBatch) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Leaves and scores of a `BeamResult`."""
        widest = max(request.beam_width for request in batch.requests)
        leaves = np.full((len(batch), widest), -1, np.int32)
        scores = np.full((len(batch), widest), -np.inf, np.float32)
        for row, request in enumerate(batch.requests):
            mask = request.filter.allowed_nodes[-1] if request.filter else np.ones(self.catalog.trie.leaf_count, bool)
            allowed = np.flatnonzero(mask)[: request.beam_width]
            leaves[row, : len(allowed)] = allowed
            scores[row, : len(allowed)] = scripted_score(allowed, len(request.history))
        return leaves, scores


def scripted_score(leaf: Any, history_length: int) -> Any:
    """Of one leaf or of an array of them."""
    return -0.25 * (leaf + history_length)


def obey(code: int) -> None:
    """Do what concerns the whole process."""
    if code == RAISE:
        raise ValueError("told to raise")
    if code == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    if code == HANG:
        time.sleep(3600)
    if code == SLOW:
        time.sleep(SLOW_SECONDS)


def obey_catalog(catalog: Catalog) -> None:
    """Do what a swap to it does."""
    order = catalog.item_ids[0].split("-")[0]
    if order == REFUSED:
        raise EngineError("catalog: needs 2.0 GiB, but 1.0 GiB are free")
    if order == BROKEN:
        raise ValueError("told to raise in /some/file")
    if order == LOST:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if order == SLOWLY:
        time.sleep(SWAP_SECONDS)
    if order == NEVER:
        time.sleep(3600)


def main() -> None:
    """Serve a catalog file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--catalog", required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--stitched", action="store_true", help="rank by the stitched executor")
    parser.add_argument("--fail-start", help="fail for good with this message")
    parser.add_argument("--fail-file", type=Path, help="end at once while this file exists")
    add_connection_arguments(parser)
    arguments = parser.parse_args()

    def load() -> tuple[Engine, Catalog, str]:
        if arguments.fail_start:
            raise EngineError(arguments.fail_start)
        if arguments.fail_file is not None and arguments.fail_file.exists():
            raise RuntimeError("told to fail")
        catalog, limits = Catalog.load(arguments.catalog), EngineLimits(arguments.max_batch, 64, 50, 3)
        if not arguments.stitched:
            return ScriptedEngine(catalog, limits, arguments.seconds), catalog, "cpu"
        from tests.server.stitched_engine import StitchedEngine

        return StitchedEngine(catalog, limits, arguments.seconds, Path(arguments.catalog).parent), catalog, "cpu"

    serve(arguments, load)


if __name__ == "__main__":
    main()
