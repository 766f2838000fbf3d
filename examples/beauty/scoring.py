"""Measures a model on the validation items while it is trained, many users at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from examples.beauty.metrics import ranking_metrics, ranks_in, without_history
from examples.beauty.sequences import VALIDATION, Sequences
from examples.groceries.scoring import LegalCodes, beam_search
from loka_serve.models.onerec_v2 import OneRecV2

USERS_AT_ONCE = {"cpu": 128}  # a GPU takes more, since launches are what it waits for


def histories(sequences: Sequences, users: NDArray[np.int64], held_out: int) -> NDArray[np.int64]:
    """Everything before the held-out event of each user: int64 [users, longest], padded at the end with -1."""
    rows = [sequences.history(int(user), held_out) for user in users]
    table = np.full((len(rows), max(len(row) for row in rows)), -1, np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


@torch.no_grad()
def recommend(
    model: OneRecV2,
    sequences: Sequences,
    legal: LegalCodes,
    *,
    held_out: int,
    beam: int,
    device: torch.device,
    users: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The `beam` best items for each user, int64 [users, beam], best first, -1 past the last."""
    codes = torch.from_numpy(sequences.semantic_ids.astype(np.int64)).to(device)
    longest, step = model.config.max_context, USERS_AT_ONCE.get(device.type, 2048)
    ranked = np.full((len(users), beam), -1, np.int64)
    for first in range(0, len(users), step):
        rows = [sequences.history(int(user), held_out)[-longest:] for user in users[first : first + step]]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        items = np.zeros((len(rows), longest if device.type == "cuda" else max(map(len, rows))), np.int64)
        for place, row in enumerate(rows):
            items[place, : len(row)] = row
        features = torch.zeros(len(rows), 0, dtype=torch.long, device=device)
        context = model.prepare_context(codes[torch.from_numpy(items).to(device)], lengths, features)
        found, scores = beam_search(model, context, lengths[:, None], legal, beam)
        best = torch.where(scores > -torch.inf, legal.item_of(found), -1)[:, 0].cpu().numpy()
        ranked[first : first + len(rows), : best.shape[1]] = best
    return ranked


def validate(
    model: OneRecV2,
    sequences: Sequences,
    legal: LegalCodes,
    *,
    beam: int,
    device: torch.device,
    users: NDArray[np.int64],
) -> dict[str, dict[str, float]]:
    """{"plain", "history_excluded"}: ranking metrics on the validation items of the users.

    The history is taken out of the ranking, not out of the search as a server does it: with beams to spare the same.
    """
    ranked = recommend(model, sequences, legal, held_out=VALIDATION, beam=beam, device=device, users=users)
    targets = sequences.targets(VALIDATION)[users].astype(np.int64)
    others = without_history(ranked, histories(sequences, users, VALIDATION))
    return {
        "plain": ranking_metrics(ranks_in(ranked, targets)),
        "history_excluded": ranking_metrics(ranks_in(others, targets)),
    }
