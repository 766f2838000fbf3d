"""Popularity, first-order Markov, own-repeat and their blend, measured as the model is.

python -m examples.groceries.baselines --data DIR
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from examples.groceries.metrics import TOP, basket_metrics, next_item_metrics, ranks_of
from examples.groceries.prepare import Sequences, load_sequences
from loka_serve.command_line import CommandParser, run_command_line

BLEND = {"markov": 0.5, "own_repeat": 0.4, "popularity": 0.1}
BASKET_DECAY = 0.97
NEXT_ITEM_BASELINES = ("popularity", "markov", "own_repeat", "own_repeat_decayed", "blend")
Scores = dict[str, NDArray[np.float32]]
Metrics = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Fitted:
    """Learned from the training rows: popularity float32 [items] and transition probabilities [items, items]."""

    popularity: NDArray[np.float32]
    transitions: sparse.csr_matrix


def fit(sequences: Sequences, items: NDArray[np.int32], held_out: int) -> Fitted:
    """Popularity and transitions of `items` (the rows in one of their orders) before the held-out basket."""
    count = len(sequences.product_ids)
    training = sequences.from_the_end > held_out
    popularity = np.bincount(items[training], minlength=count).astype(np.float32)
    follows = training[1:] & (sequences.households[1:] == sequences.households[:-1])
    previous, following = items[:-1][follows], items[1:][follows]
    pairs = sparse.csr_matrix((np.ones(len(previous), np.float32), (previous, following)), shape=(count, count))
    totals = np.maximum(np.asarray(pairs.sum(axis=1)).ravel(), 1.0).astype(np.float32)
    return Fitted(popularity / popularity.sum(), sparse.csr_matrix(sparse.diags_array(1.0 / totals) @ pairs))


def score_positions(
    fitted: Fitted, history: NDArray[np.int32], ages: NDArray[np.int32], targets: NDArray[np.int32]
) -> Scores:
    """Scores float32 [targets, items] of every baseline; row n has seen the history and the targets before n.

    ages int32 [history] counts baskets back from the held-out one (1 = the basket before it).
    """
    count = len(fitted.popularity)
    plain = np.bincount(history, minlength=count).astype(np.float32)
    decayed = np.bincount(history, weights=BASKET_DECAY**ages, minlength=count).astype(np.float32)
    seen = np.zeros((len(targets), count), np.float32)
    for position in range(1, len(targets)):
        seen[position] = seen[position - 1]
        seen[position, targets[position - 1]] += 1.0
    own, own_decayed = plain + seen, decayed + seen
    own /= np.maximum(own.sum(axis=1, keepdims=True), 1.0)
    popularity = np.broadcast_to(fitted.popularity, own.shape)
    previous = np.append(history[-1:], targets[:-1]) if len(history) else targets[:-1]
    markov = np.zeros_like(own)
    markov[len(targets) - len(previous) :] = fitted.transitions[previous].toarray()
    blend = BLEND["markov"] * markov + BLEND["own_repeat"] * own + BLEND["popularity"] * popularity
    tie_break = 1e-6 * popularity  # what no transition and no own purchase tells apart, popularity does
    return {
        "popularity": popularity,
        "markov": markov + tie_break,
        "own_repeat": own + tie_break,
        "own_repeat_decayed": own_decayed + tie_break,
        "blend": blend,
    }


def households(
    sequences: Sequences, items: NDArray[np.int32], held_out: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]]:
    """(history, ages of the history in baskets, held-out basket) of each household that has that basket."""
    for start, end in zip(sequences.household_offsets[:-1], sequences.household_offsets[1:], strict=True):
        from_the_end = sequences.from_the_end[start:end]
        rows = items[start:end]
        target, history = from_the_end == held_out, from_the_end > held_out
        if target.any():
            yield rows[history], from_the_end[history] - held_out, rows[target]


def top_items(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """The ten best items of each row of scores [rows, items], best first, ties to the lower item number."""
    candidates = np.argpartition(-scores, 4 * TOP, axis=1)[:, : 4 * TOP] if scores.shape[1] > 4 * TOP else None
    if candidates is None:
        return np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
    candidates.sort(axis=1)
    order = np.argsort(-np.take_along_axis(scores, candidates, axis=1), axis=1, kind="stable")[:, :TOP]
    return np.take_along_axis(candidates, order, axis=1)


def evaluate(sequences: Sequences, items: NDArray[np.int32], held_out: int = 0) -> dict[str, Metrics]:
    """{"next_item": {baseline: metrics}, "basket": {baseline: metrics}} on the held-out baskets of all households."""
    fitted = fit(sequences, items, held_out)
    ranks: dict[str, list[NDArray[np.int64]]] = {name: [] for name in NEXT_ITEM_BASELINES}
    lists: dict[str, list[NDArray[np.int64]]] = {name: [] for name in NEXT_ITEM_BASELINES}
    baskets = []
    for history, ages, targets in households(sequences, items, held_out):
        scores = score_positions(fitted, history, ages, targets)
        baskets.append(targets)
        for name in NEXT_ITEM_BASELINES:
            ranks[name].append(ranks_of(scores[name], targets))
            lists[name].append(top_items(scores[name][:1])[0])
    return {
        "next_item": {name: next_item_metrics(np.concatenate(ranks[name])) for name in NEXT_ITEM_BASELINES},
        "basket": {name: basket_metrics(lists[name], baskets) for name in NEXT_ITEM_BASELINES},
    }


def last_basket_results(data: Path) -> dict[str, Metrics]:
    """{"next_item", "random_order", "basket"}: baseline -> metrics, on the last baskets of the prepared data."""
    sequences = load_sequences(data)
    ordered = evaluate(sequences, sequences.items)
    shuffled = evaluate(sequences, sequences.random_items)
    # As a set, a basket has no order, and popularity and own-repeat ask for none; Markov is better off shuffled.
    return {"next_item": ordered["next_item"], "random_order": shuffled["next_item"], "basket": shuffled["basket"]}


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--held-out", type=int, default=0, help="0: the last basket (test), 1: the one before")
    arguments = parser.parse_args()
    sequences = load_sequences(arguments.data)
    for order, items in (("product_number", sequences.items), ("random", sequences.random_items)):
        print(order, json.dumps(evaluate(sequences, items, arguments.held_out), indent=1))


if __name__ == "__main__":
    run_command_line(main)
