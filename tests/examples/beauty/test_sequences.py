"""Reading and splitting the sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.beauty.sequences import (
    SEQUENCES_FILE,
    SOURCE_FILE,
    TEST,
    VALIDATION,
    BeautyError,
    load_sequences,
    read_events,
    save_sequences,
)
from tests.examples.beauty.data import USERS, synthetic_sequences, walk, write_source


def test_the_file_is_read_as_it_stands(tmp_path: Path) -> None:
    item_ids, user_ids, items, offsets = read_events(write_source(tmp_path) / SOURCE_FILE)
    expected = synthetic_sequences()
    assert np.array_equal(item_ids, expected.item_ids) and np.array_equal(user_ids, expected.user_ids)
    assert np.array_equal(items, expected.items) and np.array_equal(offsets, expected.offsets)


def test_the_last_item_is_the_test_and_the_one_before_the_validation() -> None:
    sequences = synthetic_sequences()
    for user in (0, 7, USERS - 1):
        items = [item - 100 for item in walk(user)]
        assert sequences.targets(TEST)[user] == items[-1] and sequences.targets(VALIDATION)[user] == items[-2]
        assert sequences.history(user, TEST).tolist() == items[:-1]
        assert sequences.history(user, VALIDATION).tolist() == items[:-2]
    # User 0 has five events, of which three are for training, user 1 six.
    assert sequences.training_rows()[:11].tolist() == [True] * 3 + [False] * 2 + [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 2 3 4\n2 3 x 5\n", "line 2: expected whole numbers"),
        ("1 2 3 4\n2 5 6\n", "line 2: 2 items, expected 3 or more"),
        ("", "expected at least one line"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / SOURCE_FILE).write_text(content)
    with pytest.raises(BeautyError, match=message):
        read_events(tmp_path / SOURCE_FILE)


def test_saved_sequences_are_read_back(tmp_path: Path) -> None:
    sequences = synthetic_sequences()
    save_sequences(sequences, tmp_path)
    loaded = load_sequences(tmp_path)
    assert loaded.version == sequences.version and loaded.codebook_sizes == sequences.codebook_sizes
    assert all(np.array_equal(value, getattr(loaded, name)) for name, value in vars(sequences).items())


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BeautyError, match="run python -m examples.beauty.prepare"):
        load_sequences(tmp_path)
    (tmp_path / SEQUENCES_FILE).write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(BeautyError, match=SEQUENCES_FILE):
        load_sequences(tmp_path)
