"""Batched constrained beam search over many cutoffs of one context, to measure a model at every position.

Scores are log-probabilities over each level's whole codebook, before masking, as the engines compute them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from examples.groceries.batches import ANY_ORDER, NEXT_BASKET, PRODUCT_NUMBER_ORDER, feature_table, held_out_bounds
from examples.groceries.contexts import basket_items_index, shared_context
from examples.groceries.metrics import TOP, basket_metrics, next_item_metrics
from examples.groceries.prepare import Sequences
from loka_serve.models.onerec_v2 import Context, DecodeCache, OneRecV2


class LegalCodes:
    """Which code may follow which prefix: level l is a bool table [product of earlier codebooks, V_l]."""

    def __init__(self, semantic_ids: NDArray[np.int32], codebook_sizes: tuple[int, ...], device: torch.device) -> None:
        self.codebook_sizes = codebook_sizes
        codes = torch.from_numpy(semantic_ids).long().to(device)
        self.tables = []
        prefix = torch.zeros(len(codes), dtype=torch.long, device=device)
        for level, size in enumerate(codebook_sizes):
            prefixes = int(np.prod(codebook_sizes[:level], dtype=np.int64))
            table = torch.zeros(prefixes, size, dtype=torch.bool, device=device)
            table[prefix, codes[:, level]] = True
            self.tables.append(table)
            prefix = prefix * size + codes[:, level]
        self.item_keys, self.items = torch.sort(prefix)

    def key(self, codes: Tensor) -> Tensor:
        """One number for each prefix: codes int64 [..., l] -> int64 [...]."""
        key = torch.zeros(codes.shape[:-1], dtype=torch.long, device=codes.device)
        for level in range(codes.shape[-1]):
            key = key * self.codebook_sizes[level] + codes[..., level]
        return key

    def mask(self, codes: Tensor) -> Tensor:
        """Legal next codes of prefixes int64 [..., l]: bool [..., V_l]."""
        return self.tables[codes.shape[-1]][self.key(codes)]

    def item_of(self, codes: Tensor) -> Tensor:
        """Item numbers int64 [...] of whole semantic IDs [..., L]; -1 for one that no item has."""
        key = self.key(codes)
        place = torch.searchsorted(self.item_keys, key).clamp_max(len(self.items) - 1)
        return torch.where(self.item_keys[place] == key, self.items[place], -1)


def beam_search(
    model: OneRecV2, context: Context, cutoffs: Tensor, legal: LegalCodes, beam: int
) -> tuple[Tensor, Tensor]:
    """Best `beam` semantic IDs of each cutoff: codes int64 [B, N, W, L] and scores float32 [B, N, W], best first.

    As `OneRecV2.decode_step`, but N cutoffs share a context: N * W beams a row, each seeing its part of the history.
    Scores are -inf where fewer semantic IDs exist.
    """
    batch, targets = cutoffs.shape
    cache = DecodeCache()
    codes = torch.zeros(batch, targets, 1, 0, dtype=torch.long, device=cutoffs.device)
    scores = torch.zeros(batch, targets, 1, device=cutoffs.device)
    for level in range(len(legal.codebook_sizes)):
        width = codes.shape[2]
        positions = cutoffs.repeat_interleave(width, dim=1)
        if level == 0:
            x = model.bos.expand(batch, targets, -1)
        else:
            x = model.token_embeddings[level - 1](codes[..., -1].flatten(1))
        x, visible = x[:, :, None], context.visible(positions)
        for layer in model.layers:
            x = layer(x, context, visible, positions, cache)
        logits = model.level_logits(x[:, :, 0], level).view(batch, targets, width, -1)
        totals = scores[..., None] + logits.log_softmax(-1)
        totals = totals.masked_fill(~legal.mask(codes), -torch.inf).flatten(2)
        scores, chosen = totals.topk(min(beam, totals.shape[-1]), dim=-1)
        parent, code = chosen // logits.shape[-1], chosen % logits.shape[-1]
        codes = torch.cat([codes.gather(2, parent[..., None].expand(-1, -1, -1, level)), code[..., None]], dim=-1)
        first_beam = width * torch.arange(targets, device=cutoffs.device)[None, :, None]
        cache.reorder((first_beam + parent).flatten(1))
    return codes, scores


@dataclass(frozen=True)
class HeldOut:
    """Contexts and held-out baskets of some households: history int64 [B, T, L], lengths and features as the model
    takes them, cutoffs int64 [B, N], items int64 [B, N] the held-out items (-2 for padding), basket_items int64 [B, N]
    how many items the open basket holds, as an index of that feature."""

    households: NDArray[np.int64]
    history: Tensor
    lengths: Tensor
    features: Tensor
    cutoffs: Tensor
    items: Tensor
    basket_items: Tensor


def held_out_batches(
    sequences: Sequences,
    model: OneRecV2,
    *,
    held_out: int,
    mode: int,
    targets_per_batch: int,
    device: torch.device,
    households: NDArray[np.int64] | None = None,
) -> Iterator[HeldOut]:
    """The held-out baskets of all households (or the given ones), similar sizes together.

    mode: NEXT_BASKET gives the first position alone, PRODUCT_NUMBER_ORDER and ANY_ORDER all positions in that order.
    """
    starts, ends = held_out_bounds(sequences, held_out)
    numbers = np.arange(len(starts)) if households is None else households
    numbers = numbers[ends[numbers] > starts[numbers]]
    targets = np.ones(len(numbers), np.int64) if mode == NEXT_BASKET else ends[numbers] - starts[numbers]
    lengths = starts[numbers] - sequences.household_offsets[numbers]
    features = feature_table(sequences, model.config.features)
    features[:, 0] = mode
    groups: list[list[int]] = [[]]
    for place in np.lexsort((lengths, targets)):
        if groups[-1] and (len(groups[-1]) + 1) * targets[place] > targets_per_batch:
            groups.append([])
        groups[-1].append(int(place))
    for group in groups:
        if group:
            yield _held_out_batch(
                sequences, model, features, numbers[group], starts, int(targets[group].max()), ends, mode, device
            )


def _held_out_batch(
    sequences: Sequences,
    model: OneRecV2,
    features: NDArray[np.int64],
    numbers: NDArray[np.int64],
    starts: NDArray[np.int64],
    targets: int,
    ends: NDArray[np.int64],
    mode: int,
    device: torch.device,
) -> HeldOut:
    items = sequences.items if mode == PRODUCT_NUMBER_ORDER else sequences.random_items
    # The history of the last position: everything before it. An earlier position sees a cut-off part of it.
    last = np.minimum(starts[numbers] + targets, ends[numbers]) - 1
    first = np.maximum(sequences.household_offsets[numbers], last - model.config.max_context)
    lengths = last - first
    columns = np.arange(max(int(lengths.max()), 1))
    rows = np.minimum(first[:, None] + columns, np.maximum(last[:, None] - 1, first[:, None]))
    target_rows = starts[numbers][:, None] + np.arange(targets)
    real = target_rows < ends[numbers][:, None]
    target_rows = np.where(real, target_rows, last[:, None])
    history = sequences.semantic_ids[items[rows]]
    held_out_items = np.where(real, items[target_rows], -2)
    arrays = (history, lengths, features[numbers], target_rows - first[:, None], held_out_items)
    tensors = [torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays]
    counts = torch.from_numpy(target_rows - starts[numbers][:, None]).to(device)
    tensors.append(torch.zeros_like(counts) if mode == NEXT_BASKET else basket_items_index(counts))
    return HeldOut(numbers, *tensors)


MISSED = 1 << 30
TARGETS_PER_BATCH = {"cpu": 256}  # a GPU takes more at once, since launches are what it waits for


@dataclass(frozen=True)
class Recommendations:
    """By held-out position: items int64 [P, W] best first (-1 past the last), targets and households int64 [P]."""

    items: NDArray[np.int64]
    targets: NDArray[np.int64]
    households: NDArray[np.int64]

    def ranks(self) -> NDArray[np.int64]:
        """Rank from 0 of each target among its row's items; MISSED where it is not among them."""
        found = self.items == self.targets[:, None]
        return np.where(found.any(axis=1), found.argmax(axis=1), MISSED)


@torch.no_grad()
def recommend(
    model: OneRecV2,
    sequences: Sequences,
    legal: LegalCodes,
    *,
    held_out: int,
    mode: int,
    beam: int,
    device: torch.device,
    households: NDArray[np.int64] | None = None,
    targets_per_batch: int | None = None,
    counted: bool = True,
) -> Recommendations:
    """The `beam` best items at every position of the held-out baskets (the first position in mode NEXT_BASKET).

    counted: tell a model that has the feature how many items the open basket holds.
    """
    nothing = np.zeros(0, np.int64)
    rows: list[tuple[NDArray[np.int64], ...]] = [(nothing.reshape(0, beam), nothing, nothing)]
    batches = held_out_batches(
        sequences,
        model,
        held_out=held_out,
        mode=mode,
        targets_per_batch=targets_per_batch or TARGETS_PER_BATCH.get(device.type, 1024),
        device=device,
        households=households,
    )
    for batch in batches:
        basket_items = batch.basket_items * int(counted)
        context = shared_context(model, batch.history, batch.lengths, batch.features, basket_items)
        codes, scores = beam_search(model, context, batch.cutoffs, legal, beam)
        items = torch.where(scores > -torch.inf, legal.item_of(codes), -1)
        real = (batch.items >= 0).cpu().numpy()
        owners = np.broadcast_to(batch.households[:, None], real.shape)
        items = functional.pad(items, (0, beam - items.shape[-1]), value=-1)
        rows.append((items.cpu().numpy()[real], batch.items.cpu().numpy()[real], owners[real]))
    return Recommendations(*(np.concatenate(column) for column in zip(*rows, strict=True)))


def evaluate_model(
    model: OneRecV2,
    sequences: Sequences,
    legal: LegalCodes,
    *,
    held_out: int,
    beam: int,
    device: torch.device,
    households: NDArray[np.int64] | None = None,
    targets_per_batch: int | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of {"product_number", "random", "basket"}: next item in both orders, and the basket as a set."""
    metrics = {}
    for name, mode in (("product_number", PRODUCT_NUMBER_ORDER), ("random", ANY_ORDER), ("basket", NEXT_BASKET)):
        recommended = recommend(
            model,
            sequences,
            legal,
            held_out=held_out,
            mode=mode,
            beam=beam,
            device=device,
            households=households,
            targets_per_batch=targets_per_batch,
        )
        if mode == NEXT_BASKET:
            metrics[name] = measure_baskets(recommended, sequences, held_out)
        else:
            metrics[name] = next_item_metrics(recommended.ranks())
    return metrics


def measure_baskets(recommended: Recommendations, sequences: Sequences, held_out: int) -> dict[str, float]:
    """{"recall@10", "ndcg@10"} of recommendations in mode NEXT_BASKET."""
    starts, ends = held_out_bounds(sequences, held_out)
    baskets = [sequences.items[starts[number] : ends[number]] for number in recommended.households]
    return basket_metrics(recommended.items[:, :TOP], baskets)
