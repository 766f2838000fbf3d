"""The Beauty sequences: read from text, split leave-one-out, stored with the items' semantic IDs."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loka_serve.errors import LokaError

SEQUENCES_FILE = "sequences.npz"
SOURCE_FILE = "sequences.txt"
TEST, VALIDATION = 0, 1  # events after the held-out one
LEAST_EVENTS = 3  # one to learn from, the validation item and the test item


class BeautyError(LokaError):
    """The Beauty data or one of the files derived from it is not what was expected."""


@dataclass(frozen=True)
class Sequences:
    """All users' events in time order, one user after another.

    item_ids int64 [items], the data's own numbers, ascending; user_ids int64 [users]; items int32 [events] number the
    items; offsets int64 [users + 1] delimit users; semantic_ids int32 [items, levels].
    """

    item_ids: NDArray[np.int64]
    user_ids: NDArray[np.int64]
    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    semantic_ids: NDArray[np.int32]
    codebook_sizes: tuple[int, ...]

    @property
    def version(self) -> str:
        """First 16 hex digits of a SHA-256 over items and semantic IDs: what a checkpoint is bound to."""
        content = hashlib.sha256(np.asarray(self.codebook_sizes, "<i8").tobytes())
        content.update(self.item_ids.astype("<i8").tobytes())
        content.update(self.semantic_ids.astype("<i4").tobytes())
        return content.hexdigest()[:16]

    @property
    def users(self) -> int:
        return len(self.user_ids)

    def training_rows(self) -> NDArray[np.bool_]:
        """Bool [events]: everything but each user's last two events."""
        from_the_end = np.repeat(self.offsets[1:], np.diff(self.offsets)) - 1 - np.arange(len(self.items))
        return from_the_end > VALIDATION

    def history(self, user: int, held_out: int) -> NDArray[np.int32]:
        """Everything before the held-out event (TEST or VALIDATION), oldest first; int32 [events]."""
        return self.items[self.offsets[user] : self.offsets[user + 1] - 1 - held_out]

    def targets(self, held_out: int) -> NDArray[np.int32]:
        """The held-out item of every user, int32 [users]."""
        return self.items[self.offsets[1:] - 1 - held_out]


def read_events(
    path: Path,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """item_ids, user_ids, items and offsets, as in `Sequences`, of a file of lines `user item item ...`.

    Raises:
        BeautyError: names file and line, and what was expected.
    """
    users, events, lengths = [], [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            user, *items = (int(word) for word in line.split())
        except ValueError:
            raise BeautyError(f"{path}, line {number}: expected whole numbers, user item item ...") from None
        if len(items) < LEAST_EVENTS:
            raise BeautyError(f"{path}, line {number}: {len(items)} items, expected {LEAST_EVENTS} or more")
        users.append(user)
        events.extend(items)
        lengths.append(len(items))
    if not users:
        raise BeautyError(f"{path}: expected at least one line, user item item ...")
    item_ids, items_numbered = np.unique(np.array(events, np.int64), return_inverse=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return item_ids, np.array(users, np.int64), items_numbered.astype(np.int32), offsets


def save_sequences(sequences: Sequences, directory: Path) -> None:
    """Writes DIR/sequences.npz, one array a field."""
    np.savez_compressed(directory / SEQUENCES_FILE, **vars(sequences))


def load_sequences(directory: Path) -> Sequences:
    """Reads what `save_sequences` wrote; raises BeautyError for anything else."""
    path = directory / SEQUENCES_FILE
    if not path.exists():
        raise BeautyError(f"{path} does not exist: run python -m examples.beauty.prepare --out {directory}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
        arrays["codebook_sizes"] = tuple(int(size) for size in arrays["codebook_sizes"])
        return Sequences(**arrays)
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise BeautyError(
            f"{path}: not what this version's prepare.py writes ({type(error).__name__}: {error}): prepare it again"
        ) from error
