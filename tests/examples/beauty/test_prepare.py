"""Semantic IDs come from the training events alone, and the catalog is one that the build takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from examples.beauty.co_occurrence import following_counts
from examples.beauty.prepare import derive_semantic_ids, prepare
from examples.beauty.sequences import TEST, VALIDATION, load_sequences
from loka_serve.catalog.histories import read_histories
from loka_serve.catalog.readers import read_catalog
from tests.examples.beauty.data import ITEMS, USERS, synthetic_sequences, write_source

CODEBOOK_SIZES = (4, 4, ITEMS)  # however few prefixes the ring falls into, each has room


def test_following_counts_by_hand() -> None:
    # User 0 trains on items 0, 1, 2, user 1 on 1, 2, 3, 4: pairs (1, 2) of both users at distance one, and so on.
    few = synthetic_sequences()
    few = dataclasses.replace(few, user_ids=few.user_ids[:2], items=few.items[:11], offsets=few.offsets[:3])
    counts = following_counts(few, window=2, decay=0.5).toarray()
    assert counts[0, 1] == 1 and counts[1, 2] == 2 and counts[0, 2] == 0.5 and counts[1, 3] == 0.5
    assert counts[1, 4] == 0 and counts[1, 0] == 0  # beyond the window; backwards
    assert counts.sum() == 2 + 0.5 + 3 + 2 * 0.5


def test_held_out_items_change_no_semantic_id() -> None:
    sequences = synthetic_sequences()
    other = sequences.items.copy()
    for held_out in (TEST, VALIDATION):
        ends = sequences.offsets[1:] - 1 - held_out
        other[ends] = np.random.default_rng(held_out).integers(0, ITEMS, USERS)
    changed = dataclasses.replace(sequences, items=other)
    first = derive_semantic_ids(sequences, CODEBOOK_SIZES, 3)
    assert np.array_equal(first, derive_semantic_ids(changed, CODEBOOK_SIZES, 3))
    assert len(np.unique(first, axis=0)) == ITEMS and (first < CODEBOOK_SIZES).all()


def test_items_that_training_never_saw_get_semantic_ids_too() -> None:
    sequences = synthetic_sequences()
    seen = sequences.training_rows() & (sequences.items < 4)
    few = dataclasses.replace(sequences, items=np.where(seen, sequences.items, np.int32(0)).astype(np.int32))
    assert len(np.unique(derive_semantic_ids(few, CODEBOOK_SIZES, 3), axis=0)) == ITEMS


def test_prepared_files_are_what_the_commands_read(tmp_path: Path) -> None:
    codes = tmp_path / "semantic_ids.npy"
    first = prepare(write_source(tmp_path), tmp_path / "out", codes, True, CODEBOOK_SIZES)
    again = prepare(tmp_path, tmp_path / "again", codes, False)
    assert first.version == again.version == load_sequences(tmp_path / "out").version
    catalog = read_catalog(tmp_path / "out" / "catalog.jsonl", CODEBOOK_SIZES)
    assert catalog.item_count == ITEMS
    assert catalog.semantic_id(catalog.index_of("103") or 0) == tuple(first.semantic_ids[3].tolist())
    histories = list(read_histories(tmp_path / "sequences.txt", catalog))
    assert len(histories) == USERS and histories[0].target == ["104"]
