"""The JSON files that the commands leave for each other, checked where they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from examples.groceries.prepare import Sequences
from examples.groceries.purchases import GroceriesError

TRAINING_FILE = "training.json"


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; raises GroceriesError for a file that holds anything else."""
    content = _read(path, "an object")
    if not isinstance(content, dict):
        raise GroceriesError(f"{path}: expected an object in JSON")
    return content


def read_list(path: Path) -> list[dict[str, Any]]:
    """A JSON list of objects; raises GroceriesError for a file that holds anything else."""
    content = _read(path, "a list of objects")
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise GroceriesError(f"{path}: expected a list of objects in JSON")
    return content


def _read(path: Path, expected: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise GroceriesError(f"{path}: expected {expected} in JSON: {type(error).__name__}: {error}") from None


def value_at(path: Path, content: Any, keys: str, kind: type | tuple[type, ...], expected: str) -> Any:
    """What a file's content has at dotted `keys`; raises GroceriesError unless it is there and of that type."""
    for key in keys.split("."):
        content = content.get(key) if isinstance(content, dict) else None
    if not isinstance(content, kind) or isinstance(content, bool):
        raise GroceriesError(f"{path}: {keys}: expected {expected}, got {content!r}")
    return content


def check_version(checkpoint: Path, sequences: Sequences) -> dict[str, Any]:
    """The checkpoint's training.json; raises GroceriesError if it was trained with other semantic IDs."""
    path = checkpoint / TRAINING_FILE
    training = read_object(path)
    version = value_at(path, training, "sequences_version", str, "a text")
    value_at(path, training, "best.epoch", int, "a whole number")
    if version != sequences.version:
        raise GroceriesError(
            f"{path}: trained on semantic IDs of version {version}, but the prepared data has"
            f" {sequences.version}: run prepare.py again without --recompute, or train again"
        )
    return training


def read_earlier(path: Path) -> dict[str, Any]:
    """Results that are to be replaced, nothing if there are none; raises GroceriesError for what is no results.json."""
    if not path.exists():
        return {}
    results = read_object(path)
    value_at(path, results, "environment", dict, "an object")
    return results


@dataclass(frozen=True)
class Committed:
    """What results.json says that can be measured again.

    Attributes:
        checkpoint: digest of the checkpoint, see `evaluate.checkpoint_digest`.
        product_number, random: HR@10 of the next item in these orders.
    """

    checkpoint: str
    beam: int
    product_number: float
    random: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises GroceriesError, which names file and field, for a file that is damaged or lacks one of these."""
        results = read_object(path)
        beam = value_at(path, results, "environment.beam_width", int, "a whole number from 1")
        if beam < 1:
            raise GroceriesError(f"{path}: environment.beam_width: expected a whole number from 1, got {beam}")

        def share(keys: str) -> float:
            value = float(value_at(path, results, keys, (int, float), "a number from 0 to 1"))
            if not 0 <= value <= 1:
                raise GroceriesError(f"{path}: {keys}: expected a number from 0 to 1, got {value}")
            return value

        digest = value_at(path, results, "environment.checkpoint", str, "a digest")
        return cls(digest, beam, share("ours.hr@10"), share("ours.random_order.hr@10"))
