"""Readable eager PyTorch on any device: the oracle of every test, and the default where there is no GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from loka_serve.catalog.catalog import Catalog
from loka_serve.decoding.beam_search import Beams, StageTimer, beam_search
from loka_serve.decoding.trie_tensors import TrieTensors, stack_filters
from loka_serve.engines.base import BeamResult, EngineLimits, EngineRequest, RequestBatch, check_batch
from loka_serve.errors import EngineError
from loka_serve.models.onerec_v2 import OneRecV2


class ReferenceEngine:
    """Runs one padded batch after another with the reference model and decoding."""

    name = "reference"

    def __init__(self, model: OneRecV2, catalog: Catalog, limits: EngineLimits, device: torch.device | str) -> None:
        config = model.config
        if limits.levels != config.levels or limits.context > config.max_context:
            raise EngineError(
                f"limits {limits}: expected levels = {config.levels} and context at most {config.max_context}"
            )
        self.limits = limits
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()
        self.swap_catalog(catalog)

    def swap_catalog(self, catalog: Catalog) -> None:
        sizes, expected = catalog.trie.codebook_sizes, self.model.config.codebook_sizes
        if len(sizes) != len(expected) or any(size > limit for size, limit in zip(sizes, expected, strict=True)):
            raise EngineError(f"catalog codebooks {sizes}: expected at most the model's {expected}")
        # In one step, so that a failure leaves the catalog before as it was.
        self.catalog, self.trie = catalog, TrieTensors.from_trie(catalog.trie, self.device)

    def warmup(self) -> None:
        config = self.model.config
        request = EngineRequest(
            history=np.zeros((self.limits.context, config.levels), np.int32),
            features=np.zeros(len(config.features), np.int32),
            beam_width=self.limits.beam,
        )
        self.recommend(RequestBatch((request,)))

    @torch.inference_mode()
    def recommend(self, batch: RequestBatch) -> BeamResult:
        config = self.model.config
        check_batch(batch, self.limits, len(config.features), config.codebook_sizes)
        timer = StageTimer(self.device)
        with timer.stage("context"):
            history, lengths, features = self.pad(batch)
            context = self.model.prepare_context(history, lengths, features)
        filters = [request.filter for request in batch.requests]
        allowed = stack_filters(filters, [len(codes) for codes in self.trie.codes], self.device)
        widths = torch.tensor([request.beam_width for request in batch.requests], device=self.device)
        beams = beam_search(self.model, self.trie, context, widths, allowed, timer)
        return to_result(beams, timer.seconds)

    def pad(self, batch: RequestBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(history int64 [B, T, L] padded at the end, lengths int64 [B], features int64 [B, F]) on the device."""
        longest = max(len(request.history) for request in batch.requests)
        history = np.zeros((len(batch), longest, self.limits.levels), np.int64)
        for row, request in enumerate(batch.requests):
            history[row, : len(request.history)] = request.history
        lengths = np.array([len(request.history) for request in batch.requests], np.int64)
        features = np.stack([request.features for request in batch.requests]).astype(np.int64)
        history_tensor, lengths_tensor, features_tensor = map(torch.from_numpy, (history, lengths, features))
        return history_tensor.to(self.device), lengths_tensor.to(self.device), features_tensor.to(self.device)


def to_result(beams: Beams, timings: dict[str, float]) -> BeamResult:
    """Copy the last level's beams to the host."""
    leaves = beams.nodes.to("cpu", torch.int32).numpy()
    return BeamResult(
        leaves=leaves,
        scores=beams.scores.to("cpu", torch.float32).numpy(),
        counts=(leaves >= 0).sum(1).astype(np.int32),
        failed=beams.failed.cpu().numpy(),
        timings=timings,
    )
