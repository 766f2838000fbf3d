"""A tiny synthetic shop: everyone walks the same ring of items, so that the next one is certain."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.beauty.sequences import SOURCE_FILE, Sequences

ITEMS, USERS = 24, 40
CODEBOOK_SIZES = (4, 4, 2)


def walk(user: int) -> list[int]:
    """Items of user u, numbered from 100: five to nine steps along the ring."""
    return [100 + (user + step) % ITEMS for step in range(5 + user % 5)]


def write_source(folder: Path) -> Path:
    """The folder, with sequences.txt in it."""
    lines = [" ".join(map(str, (user + 1, *walk(user)))) for user in range(USERS)]
    (folder / SOURCE_FILE).write_text("\n".join(lines) + "\n")
    return folder


def synthetic_sequences() -> Sequences:
    """What `write_source` writes, with semantic IDs that follow the ring."""
    walks, numbers = [walk(user) for user in range(USERS)], np.arange(ITEMS)
    return Sequences(
        item_ids=100 + numbers.astype(np.int64),
        user_ids=np.arange(1, USERS + 1, dtype=np.int64),
        items=np.concatenate(walks).astype(np.int32) - 100,
        offsets=np.concatenate([[0], np.cumsum([len(items) for items in walks])]).astype(np.int64),
        semantic_ids=np.stack([numbers // 8, numbers // 2 % 4, numbers % 2], axis=1).astype(np.int32),
        codebook_sizes=CODEBOOK_SIZES,
    )
