"""A decoder that computes nothing, and what the benchmarks asked of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.decoders import Decoder, Options
from benchmarks.yardstick import Shape
from loka_serve.catalog.trie import Trie
from loka_serve.engines.base import BeamResult, RequestBatch
from loka_serve.models.config import OneRecV2Config


@dataclass
class FakeEngine:
    """Takes `seconds` a batch, one batch at a time, and then `host_seconds` of the caller's.

    Raises RuntimeError for batches of `failing_batch` requests; answers NaN for those of `nan_batch`.
    """

    seconds: float = 0.0
    host_seconds: float = 0.0
    failing_batch: int = 0
    nan_batch: int = 0
    opened: list[tuple[Trie | None, list[Shape], Options]] = field(default_factory=list)
    captured: list[tuple[int, int, int]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    free_at: float = 0.0

    def open(
        self, config: OneRecV2Config, trie: Trie | None, shapes: Sequence[Shape], device: torch.device, options: Options
    ) -> Decoder:
        self.opened.append((trie, list(shapes), options))
        return Decoder(self._capture, self._submit, self._collect)

    def _capture(self, batch: int, beam: int, context: int) -> None:
        if batch == self.failing_batch:
            raise RuntimeError("out of memory")
        self.captured.append((batch, beam, context))

    def _submit(self, batch: RequestBatch) -> tuple[float, int]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.free_at = max(self.free_at, time.perf_counter()) + self.seconds
        return self.free_at, len(batch)

    def _collect(self, ticket: tuple[float, int]) -> BeamResult:
        self.in_flight -= 1
        done_at, requests = ticket
        time.sleep(max(0.0, done_at - time.perf_counter()) + self.host_seconds)
        leaves = np.zeros((requests, 1), np.int32)
        failed = np.full(requests, requests == self.nan_batch)
        return BeamResult(leaves, leaves.astype(np.float32), np.ones(requests, np.int32), failed)
