"""Beam search by enumeration of every prefix of a catalog, in float64 and plain Python: slow, and hard to get wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loka_serve.models.onerec_v2 import Context, DecodeCache

LogProbabilities = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> float64 [codes of the next level]


def brute_force_beams(
    legal: list[tuple[int, ...]], log_probabilities: LogProbabilities, beam_width: int
) -> list[tuple[tuple[int, ...], float]]:
    """Best `beam_width` of the `legal` semantic IDs, keeping that many prefixes after each level.

    Equal scores come in lexicographic order.
    """
    levels = len(legal[0]) if legal else 0
    kept: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for level in range(levels):
        prefixes = sorted({semantic_id[: level + 1] for semantic_id in legal})
        parents = dict(kept)
        scored = [
            (prefix, parents[prefix[:-1]] + float(log_probabilities(prefix[:-1])[prefix[-1]]))
            for prefix in prefixes
            if prefix[:-1] in parents
        ]
        kept = sorted(scored, key=lambda entry: (-entry[1], entry[0]))[:beam_width]
    return kept if legal else []


class PrefixModel:
    """Stands in for OneRecV2 in the search: logits are a fixed pseudo-random function of the user and the prefix.

    It carries each beam's prefix through the real `DecodeCache`, so that a wrong reorder shows.
    """

    def __init__(self, codebook_sizes: tuple[int, ...], spread: float = 6.0) -> None:
        self.codebook_sizes, self.spread = codebook_sizes, spread

    def decode_step(self, tokens: Tensor | None, level: int, context: Context, cache: DecodeCache) -> Tensor:
        batch = context.lengths.shape[0]
        if tokens is None:
            tokens = context.lengths[:, None]
        prefix, _ = cache.append(0, tokens[..., None, None, None], tokens[..., None, None, None])
        assert prefix.shape[:3] == (batch, tokens.shape[1], level + 1)
        return prefix[..., 0, 0]  # user, then the codes so far

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        weights = torch.tensor([12.9898, 78.233, 37.719, 4.581, 94.673], dtype=torch.float64)
        angle = (hidden.double() * weights[: hidden.shape[-1]]).sum(-1, keepdim=True)
        codes = torch.arange(self.codebook_sizes[level], dtype=torch.float64)
        noise = torch.frac((angle + codes * 3.1713 + level).sin() * 43758.5453)
        return (noise * self.spread).float()

    def log_probabilities(self, user: int) -> LogProbabilities:
        def of_prefix(prefix: tuple[int, ...]) -> np.ndarray:
            logits = self.level_logits(torch.tensor([[user, *prefix]]), len(prefix))[0].double()
            return (logits - logits.logsumexp(-1)).numpy()

        return of_prefix
