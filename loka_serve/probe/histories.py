"""Calibration and held-out histories: a random, disjoint sample of a file, as requests to an engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.histories import History, read_histories
from loka_serve.engines.base import EngineRequest
from loka_serve.errors import CatalogError
from loka_serve.models.config import OneRecV2Config


def sample_histories(
    calibration: Path, held_out: Path | None, catalog: Catalog, calibration_rows: int, gate_rows: int, seed: int
) -> tuple[list[History], list[History]]:
    """Histories to calibrate on and others to compare engines on.

    Each is a random sample of its file, in file order. Without a file for the second, both come from the first and
    share no row; where that has too few rows, they divide what there is in the proportion asked for.

    Raises:
        CatalogError: names the file that cannot be read or has fewer than two rows to divide.
    """
    if held_out is not None:
        return (
            [history for _, history in _sample(read_histories(calibration, catalog), calibration_rows, seed)],
            [history for _, history in _sample(read_histories(held_out, catalog), gate_rows, seed)],
        )
    picked = _sample(read_histories(calibration, catalog), calibration_rows + gate_rows, seed)
    if len(picked) < 2:
        raise CatalogError(f"{calibration}: {len(picked)} histories: expected 2 or more, or --held-out")
    share = round(len(picked) * calibration_rows / (calibration_rows + gate_rows))
    share = min(max(share, 1), len(picked) - 1)
    chosen = set(random.Random(seed).sample(range(len(picked)), share))
    return (
        [history for place, (_, history) in enumerate(picked) if place in chosen],
        [history for place, (_, history) in enumerate(picked) if place not in chosen],
    )


def to_request(history: History, catalog: Catalog, config: OneRecV2Config, beam_width: int) -> EngineRequest:
    """What the server would ask the engine for this user: known items only, the newest `max_context` of them."""
    indices = catalog.indices_of(history.items)
    codes = catalog.semantic_ids(indices[indices >= 0][-config.max_context :])
    features = [feature.index_of(history.features.get(feature.name, "")) for feature in config.features]
    return EngineRequest(codes.astype(np.int32), np.array(features, np.int32), beam_width)


def known_targets(histories: Sequence[History], catalog: Catalog) -> list[set[int]]:
    """Item indices of each history's target; empty where the file has none or the catalog does not know them."""
    return [set(catalog.indices_of(history.target).tolist()) - {-1} for history in histories]


def _sample(histories: Iterable[History], size: int, seed: int) -> list[tuple[int, History]]:
    """Reservoir sample of at most `size` rows, each with its place in the file, in file order."""
    generator = random.Random(seed)
    kept: list[tuple[int, History]] = []
    for place, history in enumerate(histories):
        if len(kept) < size:
            kept.append((place, history))
        elif (slot := generator.randrange(place + 1)) < size:
            kept[slot] = (place, history)
    return sorted(kept, key=lambda entry: entry[0])
