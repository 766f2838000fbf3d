"""Training batches: chunks of consecutive targets that share one context.

Each chunk is drawn in one of three modes, which the feature `open_basket` tells the model: the next item of a basket in
product-number order, the next item in random order, or any item of the next basket (the feature is missing; targets
see nothing of their own basket). With `counted`, a second feature says how many items the open basket holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.groceries.contexts import basket_items_index
from examples.groceries.open_basket import BASKET_ITEMS, OPEN_BASKET
from examples.groceries.prepare import Sequences
from examples.groceries.purchases import DEMOGRAPHICS
from loka_serve.models.config import FeatureConfig

NEXT_BASKET, PRODUCT_NUMBER_ORDER, ANY_ORDER = range(3)  # values of the feature, and the modes
LENGTH_STEP = 128  # contexts of one batch have similar lengths, padded to a multiple of this


@dataclass(frozen=True)
class Batch:
    """Targets of B contexts. history int64 [B, T, L], lengths [B], features [B, F]; targets int64 [B, N, L],
    cutoffs int64 [B, N] (a target sees that many history items), weights float32 [B, N] (0 for padding), basket_items
    int64 [B, N] (each target's value of the feature, see contexts.py)."""

    history: Tensor
    lengths: Tensor
    features: Tensor
    targets: Tensor
    cutoffs: Tensor
    weights: Tensor
    basket_items: Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """Rows [context_start, end) are the context, rows [start, end) the targets, all of one household."""

    household: int
    context_start: int
    start: int
    end: int


def feature_configs(sequences: Sequences, counted: bool = False) -> tuple[FeatureConfig, ...]:
    """`open_basket` first, then the demographic columns with the values that occur, then the items it holds."""
    columns = []
    for name in DEMOGRAPHICS:
        values = sorted({features[name] for features in sequences.features if name in features})
        columns.append(FeatureConfig(name, tuple(values)))
    features = (OPEN_BASKET, *columns)
    return (*features, BASKET_ITEMS) if counted else features


def feature_table(sequences: Sequences, features: tuple[FeatureConfig, ...]) -> NDArray[np.int64]:
    """Feature indices int64 [H, F]; what is said of the open basket is left missing (0)."""
    return np.array(
        [[feature.index_of(row.get(feature.name, "")) for feature in features] for row in sequences.features],
        dtype=np.int64,
    ).reshape(len(sequences.features), len(features))


def held_out_bounds(sequences: Sequences, held_out: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and one-past-last row of each household's held-out basket, int64 [H] each; equal where it has none."""
    later_rows = np.bincount(sequences.households, sequences.from_the_end < held_out, len(sequences.household_ids))
    basket_rows = np.bincount(sequences.households, sequences.from_the_end == held_out, len(sequences.household_ids))
    ends = sequences.household_offsets[1:] - later_rows.astype(np.int64)
    return ends - basket_rows.astype(np.int64), ends


def draw_chunks(
    starts: NDArray[np.int64], ends: NDArray[np.int64], size: int, context: int, generator: np.random.Generator
) -> list[Chunk]:
    """Cuts every household's rows [start, end) into chunks of at most `size` targets, the cuts at a random phase."""
    chunks = []
    for household, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        cuts = [first, *range(first + int(generator.integers(1, size + 1)), last, size), last]
        for start, end in zip(cuts[:-1], cuts[1:], strict=True):
            if end > start:
                chunks.append(Chunk(household, max(first, end - context), start, end))
    return chunks


def training_weights(
    sequences: Sequences, ends: NDArray[np.int64], household_power: float, basket_power: float
) -> NDArray[np.float32]:
    """Weights float32 [2, N] of training rows with mean one: as a target of an open basket, and of the next basket.

    A household with many purchases has many rows but only one test basket, so that its rows count less; measured as a
    set, a small basket counts as much as a large one.
    """
    starts = sequences.household_offsets[:-1]
    in_training = np.arange(len(sequences.items)) < ends[sequences.households]
    lengths = np.maximum(ends - starts, 1).astype(np.float64)[sequences.households]
    first, sizes = basket_starts(sequences), np.empty(len(sequences.items))
    _, inverse, counts = np.unique(first, return_inverse=True, return_counts=True)
    sizes = counts[inverse].astype(np.float64)
    weights = np.stack([lengths**-household_power, lengths**-household_power * sizes**-basket_power])
    return (weights / weights[:, in_training].mean(axis=1, keepdims=True)).astype(np.float32)


def basket_starts(sequences: Sequences) -> NDArray[np.int64]:
    """First row of every row's basket, int64 [N]."""
    households, baskets = sequences.households, sequences.from_the_end
    new = np.ones(len(baskets), dtype=bool)
    new[1:] = (households[1:] != households[:-1]) | (baskets[1:] != baskets[:-1])
    return np.flatnonzero(new)[np.cumsum(new) - 1]


class BatchSource:
    """Draws an epoch of batches; everything random follows from (seed, epoch), so an epoch can be replayed.

    mode_shares: parts of the chunks in the modes (next basket, product-number order, any order), summing to one.
    count_dropout: part of the chunks that leave the number of items in the open basket out; None leaves it out of all.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        held_out: int,
        chunk: int,
        context: int,
        rows: int,
        mode_shares: tuple[float, float, float],
        feature_dropout: float,
        household_power: float,
        basket_power: float,
        device: torch.device,
        seed: int,
        epoch_share: float = 1.0,
        count_dropout: float | None = None,
    ) -> None:
        self.sequences, self.seed, self.device = sequences, seed, device
        self.chunk, self.context, self.rows, self.epoch_share = chunk, context, rows, epoch_share
        self.mode_shares, self.feature_dropout, self.count_dropout = mode_shares, feature_dropout, count_dropout
        self.starts = sequences.household_offsets[:-1]
        self.ends = held_out_bounds(sequences, held_out)[0]
        configs = feature_configs(sequences, counted=count_dropout is not None)
        self.features = torch.from_numpy(feature_table(sequences, configs)).to(device)
        self.codes = torch.from_numpy(sequences.semantic_ids).long().to(device)
        weights = training_weights(sequences, self.ends, household_power, basket_power)
        self.weights = torch.from_numpy(weights).to(device)
        self.basket_starts = torch.from_numpy(basket_starts(sequences)).to(device)

    def epoch(self, epoch: int) -> Iterator[tuple[float, Batch]]:
        """(fraction of the epoch done before it, batch) for each batch, contexts of similar length together."""
        generator = np.random.default_rng((self.seed, epoch))
        sequences = self.sequences
        keys = generator.random(len(sequences.items))
        shuffled = sequences.items[np.lexsort((keys, -sequences.from_the_end, sequences.households))]
        items = torch.from_numpy(np.stack([sequences.items, shuffled])).long().to(self.device)
        chunks = draw_chunks(self.starts, self.ends, self.chunk, self.context, generator)
        chunks = [chunks[index] for index in generator.permutation(len(chunks))]
        chunks.sort(key=lambda chunk: -((chunk.end - chunk.context_start - 1) // LENGTH_STEP))
        groups = [chunks[start : start + self.rows] for start in range(0, len(chunks), self.rows)]
        drawn = generator.permutation(len(groups))[: max(1, round(self.epoch_share * len(groups)))]
        for done, index in enumerate(drawn):
            yield done / len(drawn), self._batch(groups[index], items, generator)

    def _batch(self, chunks: list[Chunk], items: Tensor, generator: np.random.Generator) -> Batch:
        rows = np.array([(c.household, c.context_start, c.start, c.end) for c in chunks], dtype=np.int64)
        modes = generator.choice(3, len(chunks), p=self.mode_shares)
        hidden = generator.random(len(chunks)) < self.feature_dropout
        packed = np.concatenate([rows, modes[:, None], hidden[:, None]], axis=1)
        household, context_start, start, end, mode, unknown = torch.from_numpy(packed).to(self.device).unbind(1)
        longest = int((rows[:, 3] - rows[:, 1]).max())
        longest += -longest % LENGTH_STEP
        positions = torch.arange(longest, device=self.device)
        history_rows = torch.minimum(context_start[:, None] + positions, end[:, None] - 1)
        target_rows = start[:, None] + torch.arange(self.chunk, device=self.device)
        real = target_rows < end[:, None]
        target_rows = torch.minimum(target_rows, end[:, None] - 1)
        features = self.features[household] * (1 - unknown[:, None])
        features[:, 0] = mode
        order = (mode != PRODUCT_NUMBER_ORDER).long()[:, None]
        next_basket = (mode == NEXT_BASKET)[:, None]
        basket_start = self.basket_starts[target_rows]
        seen = torch.where(next_basket, basket_start, target_rows) - context_start[:, None]
        basket_items = None
        if self.count_dropout is not None:
            told = torch.from_numpy(generator.random(len(chunks)) >= self.count_dropout).to(self.device)[:, None]
            basket_items = basket_items_index(target_rows - basket_start) * (told & ~next_basket)
        return Batch(
            history=self.codes[items[order, history_rows]],
            lengths=end - context_start,
            features=features,
            targets=self.codes[items[order, target_rows]],
            cutoffs=seen.clamp_min(0),
            weights=real * self.weights[next_basket.long(), target_rows],
            basket_items=basket_items,
        )
