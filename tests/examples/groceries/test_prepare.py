"""Prepared files: what the library reads, deterministic, and of the version that the checkpoint was trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from examples.groceries.evaluate import CHECKPOINT
from examples.groceries.prepare import (
    Sequences,
    history_rows,
    load_semantic_ids,
    load_sequences,
    product_name,
    save_sequences,
)
from examples.groceries.purchases import GroceriesError, Product
from examples.groceries.records import check_version
from loka_serve.catalog.histories import read_histories
from loka_serve.catalog.readers import read_catalog
from tests.examples.groceries.data import BASKET, BASKETS, synthetic_sequences


def test_the_real_data_has_the_version_of_the_checkpoint(prepared: tuple[Path, Sequences]) -> None:
    directory, sequences = prepared
    assert len(sequences.product_ids) == 19_900
    assert len(sequences.household_ids) == 2_466
    assert len(sequences.items) == 1_346_681
    assert check_version(CHECKPOINT, sequences)["sequences_version"] == sequences.version
    assert load_sequences(directory).version == sequences.version


def test_the_library_reads_catalog_and_histories(prepared: tuple[Path, Sequences]) -> None:
    directory, sequences = prepared
    catalog = read_catalog(directory / "catalog.jsonl", sequences.codebook_sizes)
    assert catalog.item_count == 19_900
    assert {"name", "department", "category", "type", "brand"} <= set(catalog.attributes)
    histories = list(read_histories(directory / "histories.jsonl", catalog))
    assert len(histories) == 2_466
    last = sequences.from_the_end[sequences.households == 0] == 0
    assert len(histories[0].items) == (~last).sum() and len(histories[0].target) == last.sum()


def test_histories_ask_for_the_next_basket_and_for_items_of_an_open_one() -> None:
    sequences = synthetic_sequences()
    rows = list(history_rows(sequences))
    assert rows == list(history_rows(sequences))
    offsets, filled_baskets = sequences.household_offsets, set()
    for household, row in enumerate(rows):
        order, features = row["features"].get("open_basket"), row["features"]
        assert order == (None, "product_number_order", "any_order")[household % 3]
        assert features.get("age") == sequences.features[household].get("age")
        both = sequences.items if order == "product_number_order" else sequences.random_items
        bought = [str(number) for number in sequences.product_ids[both[offsets[household] : offsets[household + 1]]]]
        known = len(row["history"])
        if order is None:
            assert "open_basket_items" not in features and known == (BASKETS - 1) * BASKET
            assert row["history"] + row["target"] == bought
        else:
            # The basket before the last one is open, and the last one is nowhere.
            filled = int(features["open_basket_items"])
            assert known == (BASKETS - 2) * BASKET + filled and len(row["target"]) == BASKET - filled > 0
            assert row["history"] + row["target"] == bought[:-BASKET]
            filled_baskets.add(filled)
    assert len(filled_baskets) > 1
    only_one = dataclasses.replace(sequences, from_the_end=np.zeros_like(sequences.from_the_end))
    assert all(row["history"] == [] and "open_basket" not in row["features"] for row in history_rows(only_one))


def test_another_version_is_refused(tmp_path: Path) -> None:
    sequences = synthetic_sequences()
    (tmp_path / "training.json").write_text(json.dumps({"sequences_version": sequences.version, "best": {"epoch": 3}}))
    check_version(tmp_path, sequences)
    swapped = dataclasses.replace(sequences, semantic_ids=sequences.semantic_ids[::-1].copy())
    message = f"version {sequences.version}, but the prepared data has {swapped.version}"
    with pytest.raises(GroceriesError, match=message):
        check_version(tmp_path, swapped)


def test_sequences_survive_a_round_trip(tmp_path: Path) -> None:
    sequences = synthetic_sequences()
    save_sequences(sequences, tmp_path)
    loaded = load_sequences(tmp_path)
    assert loaded.features == sequences.features and loaded.codebook_sizes == sequences.codebook_sizes
    for field in dataclasses.fields(Sequences):
        if isinstance(getattr(sequences, field.name), np.ndarray):
            assert np.array_equal(getattr(loaded, field.name), getattr(sequences, field.name))
    with pytest.raises(GroceriesError, match="run python -m examples.groceries.prepare"):
        load_sequences(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"plain text"])
def test_damaged_data_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sequences.npz").write_bytes(content)
    with pytest.raises(GroceriesError, match=r"sequences\.npz: not what this version's prepare\.py writes"):
        load_sequences(tmp_path)


def test_damaged_semantic_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "semantic_ids.npy"
    with pytest.raises(GroceriesError, match="--recompute derives it"):
        load_semantic_ids(path, 2)
    for codes in ([[0, 1], [0, 1]], [[0, 1], [4, 0]], [[0, 1]]):  # twice the same, out of range, too few
        np.save(path, np.array([[4, 4], *codes], dtype=np.uint16))
        with pytest.raises(GroceriesError, match="expected 2 distinct semantic IDs"):
            load_semantic_ids(path, 2)
    np.save(path, np.array([[4, 4], [0, 1], [3, 3]], dtype=np.uint16))
    assert load_semantic_ids(path, 2)[1] == (4, 4)


def test_product_names_are_readable() -> None:
    pickles = Product("GROCERY", "PICKLE/RELISH/PKLD VEG", "PICKLES", "National", "16 OZ")
    assert product_name(pickles, 1) == "Pickles, 16 oz"
    sauce = Product("GROCERY", "PASTA SAUCE", "PREMIUM", "Private", "24 OZ")
    assert product_name(sauce, 2) == "Pasta sauce: premium, 24 oz (private label)"
    assert product_name(Product("", "", "", "", ""), 3) == "Product 3"
