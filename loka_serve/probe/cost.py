"""What one site's recipe costs the whole model: everything else in BF16, on held-out histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loka_serve.engines.base import EngineRequest
from loka_serve.models.onerec_v2 import Context, OneRecV2
from loka_serve.quantization.recipes import RECIPES

TOP_K = 10
CANDIDATES = 2 * TOP_K
BATCH = 8
MAX_CACHED_WEIGHTS = 1 << 21
"""Up to this size a site's dequantized weight is kept for all its calls."""


@dataclass(frozen=True)
class ModelCost:
    """Change of the model's answers when one site alone is quantized.

    Attributes:
        recipe: that the site runs.
        histories: that were compared.
        kl_divergence: mean KL(BF16 || quantized) of the level softmax in nats, over histories, candidates and levels.
        kl_by_level: the same, level by level.
        top_k: K of the overlap.
        top_k_overlap: mean share of BF16's K best candidates that stay among the K best.
    """

    recipe: str
    histories: int
    kl_divergence: float
    kl_by_level: tuple[float, ...]
    top_k: int
    top_k_overlap: float


@torch.inference_mode()
def model_costs(
    model: OneRecV2,
    requests: Sequence[EngineRequest],
    candidates: Sequence[NDArray[np.int32]],
    recipes: Mapping[str, str],
    input_amax: Mapping[str, float],
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, ModelCost]:
    """Quantize one site after the other, each alone, and compare the model's logits with those of BF16.

    Candidates are scored by teacher forcing, a history's all at once: their ranking is that of a beam search that found
    the same ones, at a fraction of its time.

    Args:
        model: in BF16, with its weights (`run_as_bf16`); as it was afterwards.
        requests: held-out histories.
        candidates: int32 [C, levels] of each history, C >= 1: the semantic IDs that BF16 ranks first.
        recipes: by site, the sites to try.
        input_amax: calibrated largest input magnitude of those sites.
        progress: called with the number of histories just done.

    Returns:
        by site; empty without histories.
    """
    if not requests:
        return {}
    k = max(1, min(TOP_K, min(map(len, candidates)) // 2))
    totals = {name: _Totals() for name in recipes}
    # Histories in the outer loop: one batch's context is in memory at a time.
    for start in range(0, len(requests), BATCH):
        batch = _Batch(requests[start : start + BATCH], candidates[start : start + BATCH], model.bos.device)
        context = batch.context(model)
        expected = batch.logits(model, context)
        for name, recipe in recipes.items():
            with _quantized(model, name, recipe, input_amax[name]):
                changed = batch.context(model) if name.startswith("context.") else context
                totals[name].add(batch, expected, batch.logits(model, changed), k)
        progress(len(batch.lengths))
    return {name: totals[name].cost(recipe, k) for name, recipe in recipes.items()}


@contextmanager
def _quantized(model: OneRecV2, name: str, recipe: str, input_amax: float) -> Iterator[None]:
    """Let one site run by a recipe inside the `with` block."""
    site, chosen = model.sites()[name], RECIPES[recipe]
    assert site.weight is not None
    state = chosen.quantize_weight(site.weight.data, input_amax if chosen.needs_input_amax else None)
    cache = site.weight.numel() <= MAX_CACHED_WEIGHTS
    before, site.method = site.method, chosen.prepare(state, site.weight.device, cache)
    try:
        yield
    finally:
        site.method = before


class _Batch:
    """Some histories and their candidates, padded to the longest of each."""

    def __init__(
        self, requests: Sequence[EngineRequest], candidates: Sequence[NDArray[np.int32]], device: torch.device
    ) -> None:
        levels = candidates[0].shape[1]
        self.lengths = torch.tensor([len(request.history) for request in requests], device=device)
        history = np.zeros((len(requests), max(len(request.history) for request in requests), levels), np.int64)
        targets = np.zeros((len(requests), max(map(len, candidates)), levels), np.int64)
        for row, (request, codes) in enumerate(zip(requests, candidates, strict=True)):
            history[row, : len(request.history)] = request.history
            targets[row, : len(codes)] = codes
        self._history, self.targets = torch.from_numpy(history).to(device), torch.from_numpy(targets).to(device)
        features = np.stack([request.features for request in requests]).astype(np.int64)
        self._features = torch.from_numpy(features).to(device)
        counts = torch.tensor([len(codes) for codes in candidates], device=device)
        self.valid = torch.arange(targets.shape[1], device=device) < counts[:, None]  # [B, C]

    def context(self, model: OneRecV2) -> Context:
        return model.prepare_context(self._history, self.lengths, self._features)

    def logits(self, model: OneRecV2, context: Context) -> list[Tensor]:
        """Log-probabilities of every level's codes, float32 [B, C, V_l]."""
        cutoffs = self.lengths[:, None].expand(-1, self.targets.shape[1])
        return [logits.log_softmax(-1) for logits in model.teacher_forced(context, self.targets, cutoffs)]

    def scores(self, levels: Sequence[Tensor]) -> Tensor:
        """Log-probability of each candidate, float32 [B, C]; -inf where there is none."""
        total = torch.zeros(self.valid.shape, device=self.valid.device)
        for level, log_probabilities in enumerate(levels):
            total += log_probabilities.gather(-1, self.targets[..., level, None])[..., 0]
        return total.masked_fill(~self.valid, float("-inf"))


class _Totals:
    """Comparisons of one site, history by history."""

    def __init__(self) -> None:
        self._divergences: list[list[float]] = []  # [histories][levels], means over candidates
        self._overlaps: list[float] = []

    def add(self, batch: _Batch, expected: Sequence[Tensor], found: Sequence[Tensor], k: int) -> None:
        by_level = []
        for ours, theirs in zip(expected, found, strict=True):
            divergence = (ours.double().exp() * (ours.double() - theirs.double())).sum(-1) * batch.valid
            by_level.append(divergence.sum(1) / batch.valid.sum(1))
        self._divergences += torch.stack(by_level, 1).tolist()
        best, now = batch.scores(expected).topk(k).indices, batch.scores(found).topk(k).indices
        self._overlaps += (best[:, :, None] == now[:, None, :]).any(-1).double().mean(1).tolist()

    def cost(self, recipe: str, k: int) -> ModelCost:
        histories = len(self._overlaps)
        by_level = tuple(sum(level) / histories for level in zip(*self._divergences, strict=True))
        return ModelCost(recipe, histories, sum(by_level) / len(by_level), by_level, k, sum(self._overlaps) / histories)
