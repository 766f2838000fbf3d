"""Popularity and windowed co-occurrence, measured as the model is.

python -m examples.beauty.baselines --data DIR
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from examples.beauty.co_occurrence import following_counts
from examples.beauty.metrics import ranking_metrics
from examples.beauty.sequences import TEST, VALIDATION, Sequences, load_sequences
from loka_serve.command_line import CommandParser, run_command_line

RECENT, RECENCY_DECAY = 5, 0.7  # chosen on the validation items
USERS_AT_ONCE = 1024
Metrics = dict[str, dict[str, float]]


def queries(sequences: Sequences, held_out: int, users: NDArray[np.int64]) -> sparse.csr_matrix:
    """[users, items]: the newest items of each history with weights that fall by age."""
    rows, columns, values = [], [], []
    for place, user in enumerate(users):
        newest = sequences.history(int(user), held_out)[-RECENT:][::-1]
        rows.append(np.full(len(newest), place))
        columns.append(newest)
        values.append(RECENCY_DECAY ** np.arange(len(newest)))
    shape = (len(users), len(sequences.item_ids))
    return sparse.csr_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=shape)


def scored(
    sequences: Sequences, held_out: int, symmetric: bool
) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]]:
    """(users, {"popularity", "co_occurrence"} -> scores [users, items]) of some users after the others.

    co_occurrence: how often items followed the newest ones in the training events, in a window; with `symmetric`,
    also how often they came before them. What no count tells apart, popularity does.
    """
    counts = following_counts(sequences)
    counts = counts + counts.T if symmetric else counts
    frequency = np.bincount(sequences.items[sequences.training_rows()], minlength=len(sequences.item_ids))
    popularity = frequency / frequency.max()
    for first in range(0, sequences.users, USERS_AT_ONCE):
        users = np.arange(first, min(first + USERS_AT_ONCE, sequences.users))
        together = (queries(sequences, held_out, users) @ counts).toarray() + 1e-6 * popularity
        yield users, {"popularity": np.broadcast_to(popularity, together.shape), "co_occurrence": together}


def evaluate(sequences: Sequences, held_out: int = TEST, symmetric: bool = False) -> dict[str, Metrics]:
    """Baseline -> {"plain", "history_excluded"} -> ranking metrics on the held-out items of all users."""
    ranks: dict[str, dict[str, list[NDArray[np.int64]]]] = {}
    targets = sequences.targets(held_out)
    for users, tables in scored(sequences, held_out, symmetric):
        histories = [sequences.history(int(user), held_out) for user in users]
        for name, scores in tables.items():
            for mode in ("plain", "history_excluded"):
                if mode == "history_excluded":
                    scores = scores.copy()
                    for place, history in enumerate(histories):
                        scores[place, history] = -1.0
                own = scores[np.arange(len(users)), targets[users]][:, None]
                # Of equals half are taken to come first: their order is chance, and item numbers would tell too much.
                rank = (scores > own).sum(axis=1) + ((scores == own).sum(axis=1) - 1) // 2
                ranks.setdefault(name, {}).setdefault(mode, []).append(rank)
    return {
        name: {mode: ranking_metrics(np.concatenate(parts)) for mode, parts in modes.items()}
        for name, modes in ranks.items()
    }


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--held-out", choices=("test", "validation"), default="test")
    parser.add_argument("--symmetric", action="store_true", help="count also what came before")
    arguments = parser.parse_args()
    held_out = {"test": TEST, "validation": VALIDATION}[arguments.held_out]
    print(json.dumps(evaluate(load_sequences(arguments.data), held_out, arguments.symmetric), indent=1))


if __name__ == "__main__":
    run_command_line(main)
