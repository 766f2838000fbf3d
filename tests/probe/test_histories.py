"""Sampling calibration and held-out histories, and turning them into requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.histories import History
from loka_serve.catalog.readers import read_catalog
from loka_serve.errors import CatalogError
from loka_serve.probe.histories import known_targets, sample_histories, to_request
from tests.building import CONFIG, write_catalog, write_histories


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("histories")
    write_catalog(folder / "items.jsonl")
    write_histories(folder / "a.jsonl", 60)
    write_histories(folder / "b.jsonl", 30, seed=1)
    return folder


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Catalog:
    return read_catalog(folder / "items.jsonl", CONFIG.codebook_sizes)


def users(histories: list[History]) -> list[int]:
    return [int(history.user_id.removeprefix("user")) for history in histories]


def test_one_file_is_divided_without_overlap(folder: Path, catalog: Catalog) -> None:
    calibration, held_out = sample_histories(folder / "a.jsonl", None, catalog, 10, 20, seed=0)
    assert len(calibration) == 10 and len(held_out) == 20
    assert not set(users(calibration)) & set(users(held_out))
    assert users(calibration) == sorted(users(calibration))  # file order
    assert max(users(calibration + held_out)) > 40  # from the whole file, not its beginning


def test_the_seed_decides(folder: Path, catalog: Catalog) -> None:
    def picked(seed: int) -> list[int]:
        return users(sample_histories(folder / "a.jsonl", None, catalog, 10, 20, seed)[0])

    assert picked(0) == picked(0) != picked(1)


def test_too_few_rows_are_shared_in_proportion(folder: Path, catalog: Catalog) -> None:
    calibration, held_out = sample_histories(folder / "a.jsonl", None, catalog, 300, 100, seed=0)
    assert len(calibration) == 45 and len(held_out) == 15
    calibration, held_out = sample_histories(folder / "a.jsonl", None, catalog, 10_000, 1, seed=0)
    assert len(held_out) == 1


def test_two_files(folder: Path, catalog: Catalog) -> None:
    calibration, held_out = sample_histories(folder / "a.jsonl", folder / "b.jsonl", catalog, 200, 7, seed=0)
    assert len(calibration) == 60 and len(held_out) == 7


def test_one_row_cannot_be_divided(folder: Path, catalog: Catalog) -> None:
    path = write_histories(folder / "one.jsonl", 1)
    with pytest.raises(CatalogError, match="one.jsonl: 1 histories: expected 2 or more, or --held-out"):
        sample_histories(path, None, catalog, 1, 1, seed=0)


def test_requests_hold_the_newest_known_items(catalog: Catalog) -> None:
    items = ["item7", "nobody's", *(f"item{index}" for index in range(30))]
    request = to_request(History("u", items, features={"segment": "regular"}), catalog, CONFIG, 5)
    expected = [catalog.semantic_id(catalog.index_of(f"item{index}") or 0) for index in range(10, 30)]
    assert request.history.tolist() == [list(codes) for codes in expected]  # max_context = 20
    assert request.history.dtype == np.int32 and request.beam_width == 5
    assert request.features.tolist() == [2]


def test_an_unknown_user(catalog: Catalog) -> None:
    request = to_request(History("u", ["nobody's"], features={"segment": "other"}), catalog, CONFIG, 5)
    assert request.history.shape == (0, 3) and request.features.tolist() == [0]


def test_targets(catalog: Catalog) -> None:
    histories = [History("u", [], ["item3", "nobody's"]), History("v", [])]
    assert known_targets(histories, catalog) == [{catalog.index_of("item3")}, set()]
