"""Which items follow which: counts in a window over the training events."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from examples.beauty.sequences import Sequences

WINDOW, DECAY = 50, 0.7


def following_counts(sequences: Sequences, window: int = WINDOW, decay: float = DECAY) -> sparse.csr_matrix:
    """[items, items]: how often the column's item follows the row's, each time decay^(distance - 1), within the window.

    Training events only: a user's last two events count nowhere.
    """
    training = sequences.training_rows()
    items = sequences.items[training]
    users = np.repeat(np.arange(sequences.users), np.diff(sequences.offsets))[training]
    rows, columns, values = [], [], []
    for distance in range(1, window + 1):
        same = users[distance:] == users[:-distance]
        rows.append(items[:-distance][same])
        columns.append(items[distance:][same])
        values.append(np.full(int(same.sum()), decay ** (distance - 1)))
    count = len(sequences.item_ids)
    pairs = (np.concatenate(rows), np.concatenate(columns))
    return sparse.csr_matrix((np.concatenate(values), pairs), shape=(count, count))
