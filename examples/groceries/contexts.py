"""How full the open basket is, as a static feature, and one context that serves targets of baskets filled differently.

A request has one static position; it may say in the feature `open_basket_items` how many of the last history items are
in the open basket. Consecutive targets share a history but not that number. So a shared context has one static slot for
each value of the feature, and every target sees its own: what it computes equals a request of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.groceries.open_basket import BASKET_ITEM_BOUNDS, BASKET_ITEMS
from loka_serve.models.onerec_v2 import Context, OneRecV2

SLOTS = len(BASKET_ITEMS.values) + 1


def basket_items_index(counts: Tensor) -> Tensor:
    """Index of the feature's value for numbers of items in the open basket; int64 [...] -> int64 [...], at least 1."""
    return torch.bucketize(counts, torch.tensor(BASKET_ITEM_BOUNDS, device=counts.device), right=True)


@dataclass
class SharedContext(Context):
    """A context with SLOTS static slots; basket_items int64 [B, N] says which one each of N targets sees."""

    basket_items: Tensor

    def visible(self, cutoffs: Tensor) -> Tensor:
        """Bool [B, N * W, SLOTS + T] for cutoffs [B, N * W], W beams of a target next to each other."""
        repeats = cutoffs.shape[1] // self.basket_items.shape[1]
        own = self.basket_items[..., None] == torch.arange(SLOTS, device=cutoffs.device)
        items = torch.arange(self.keys[0].shape[1] - SLOTS, device=cutoffs.device) < cutoffs[..., None]
        return torch.cat([own.repeat_interleave(repeats, dim=1), items], dim=-1)


def counts_basket_items(model: OneRecV2) -> bool:
    """Whether the model has the feature; it is then the last one."""
    return BASKET_ITEMS in model.config.features


def shared_context(
    model: OneRecV2, history: Tensor, lengths: Tensor, features: Tensor, basket_items: Tensor | None
) -> Context:
    """`OneRecV2.prepare_context`; with basket_items int64 [B, N] (indices of the feature) one for N different targets.

    history must have at least one column.
    """
    context = model.prepare_context(history, lengths, features)
    if basket_items is None or not counts_basket_items(model):
        return context
    batch = len(lengths)
    every_value = features[:, None].repeat(1, SLOTS, 1)
    every_value[..., -1] = torch.arange(SLOTS, device=features.device)
    # One item stands in for the history: the static slot does not depend on it.
    first = history[:, None, :1].expand(-1, SLOTS, -1, -1).flatten(0, 1)
    static = model.prepare_context(first, torch.zeros_like(first[:, 0, 0]), every_value.flatten(0, 1))

    def join(slots: Tensor, items: Tensor) -> Tensor:
        return torch.cat([slots[:, 0].unflatten(0, (batch, SLOTS)), items[:, 1:]], dim=1)

    return SharedContext(
        keys=[join(slots, items) for slots, items in zip(static.keys, context.keys, strict=True)],
        values=[join(slots, items) for slots, items in zip(static.values, context.values, strict=True)],
        lengths=lengths,
        basket_items=basket_items,
    )
