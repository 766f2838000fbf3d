"""User histories for calibration and tests, read one by one from JSON Lines, MiniOneRec CSV or plain sequences."""

from __future__ import annotations

import ast
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from loka_serve.catalog.attributes import attribute_text
from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.readers.base import decode_lines, read_json_lines, read_lines
from loka_serve.errors import CatalogError

MISMATCH_AFTER = 1000  # histories without one known item: the ids are those of another catalog
CSV_COLUMNS = ("user_id", "history_item_id", "item_id")
LARGEST_CSV_FIELD = 1 << 30

# Python's limit of 128 KiB is less than the titles of one long history. It is checked while rows are read, for the
# whole process, so it is raised once, and never lowered.
csv.field_size_limit(max(csv.field_size_limit(), LARGEST_CSV_FIELD))


@dataclass(frozen=True)
class History:
    """What one user did, oldest first, and what came next.

    Attributes:
        user_id: the user.
        items: ids of the history's items; ids that the catalog does not know are kept.
        target: ids of the items that followed; empty if the file has none.
        features: static user features by name, values as text.
    """

    user_id: str
    items: list[str]
    target: list[str] = field(default_factory=list)
    features: dict[str, str] = field(default_factory=dict)


def read_histories(path: Path | str, catalog: Catalog | None = None) -> Iterator[History]:
    """Read histories lazily, in file order; the format is told by the extension.

    - ``.jsonl``, ``.ndjson``: ``{"user_id", "history": [item, ...], "target"?: [item, ...], "features"?: {...}}``
    - ``.csv``: MiniOneRec: columns ``user_id``, ``history_item_id`` (a Python list), ``item_id`` (the target)
    - ``.txt``: ``user item item ...``, in time order; the last item is the target

    Args:
        path: the file.
        catalog: where given, a file of which the first thousand histories hold no item of it is refused, since its ids
            must be of another kind. Single unknown items are kept either way.

    Raises:
        CatalogError: naming file, line and field, and what was expected. Those about the content come on the way.
    """
    path = Path(path)
    if not path.is_file():
        raise CatalogError(f"{path}: no such file")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CatalogError(f"{path}: expected a history file with one of the extensions {', '.join(sorted(_READERS))}")
    return _checked(path, reader(path), catalog)


def _checked(path: Path, histories: Iterator[History], catalog: Catalog | None) -> Iterator[History]:
    """Pass the histories on; refuse an empty file, and ids of another catalog."""
    count, any_known = 0, catalog is None
    for history in histories:
        count += 1
        if catalog is not None and not any_known:
            any_known = bool((catalog.indices_of([*history.items, *history.target]) >= 0).any())
            if not any_known and count == MISMATCH_AFTER:
                break
        yield history
    if count == 0:
        raise CatalogError(f"{path}: expected at least one history, found none")
    if not any_known:
        raise CatalogError(f"{path}: expected items of the catalog, the first {count} histories hold none of them")


def _read_json_lines(path: Path) -> Iterator[History]:
    for number, row in read_json_lines(path):
        for name in ("user_id", "history"):
            if name not in row:
                _fail(path, number, f"{name}: missing field")
        yield History(
            user_id=_id(path, number, "user_id", row["user_id"]),
            items=_ids(path, number, "history", row["history"]),
            target=_ids(path, number, "target", row.get("target") or []),
            features=_features(path, number, row.get("features") or {}),
        )


def _read_csv(path: Path) -> Iterator[History]:
    reader = csv.DictReader(decode_lines(path), strict=True)
    try:
        columns = reader.fieldnames or []
        for name in CSV_COLUMNS:
            if name not in columns:
                _fail(path, 1, f"{name}: missing column; the columns are {', '.join(columns) or 'none'}")
        for row in reader:
            number = reader.line_num
            user_id, history, target = (row[name] for name in CSV_COLUMNS)
            if user_id is None or history is None or target is None:
                _fail(path, number, f"expected {len(columns)} columns, got fewer")
            try:
                items = ast.literal_eval(history.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                _fail(path, number, f"history_item_id: expected a list as Python writes it, got {history[:80]!r}")
            yield History(
                user_id=_id(path, number, "user_id", user_id),
                items=_ids(path, number, "history_item_id", items),
                target=[_id(path, number, "item_id", target)],
            )
    except csv.Error as error:
        _fail(path, reader.reader.line_num, f"expected CSV, got: {error}")


def _read_sequences(path: Path) -> Iterator[History]:
    for number, line in read_lines(path):
        user_id, *items = line.split()
        if not items:
            _fail(path, number, f"expected a user and at least one item, got {line[:80]!r}")
        yield History(user_id=user_id, items=items[:-1], target=items[-1:])


_READERS: dict[str, Callable[[Path], Iterator[History]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": _read_csv,
    ".txt": _read_sequences,
}


def _fail(path: Path, line: int, message: str) -> NoReturn:
    raise CatalogError(f"{path}, line {line}: {message}")


def _id(path: Path, line: int, name: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError:  # Python writes no integers beyond some thousands of digits
            _fail(path, line, f"{name}: expected an id, got an integer of {value.bit_length()} bits")
    _fail(path, line, f"{name}: expected an id: a string that is not empty or an integer, got {value!r}")


def _ids(path: Path, line: int, name: str, values: object) -> list[str]:
    if not isinstance(values, list):
        _fail(path, line, f"{name}: expected a list of ids, got {type(values).__name__}")
    return [_id(path, line, name, value) for value in values]


def _features(path: Path, line: int, features: object) -> dict[str, str]:
    if not isinstance(features, dict):
        _fail(path, line, f"features: expected an object, got {type(features).__name__}")
    texts = {}
    for name, value in features.items():
        if value is None:
            continue
        try:
            texts[str(name)] = attribute_text(value)[0]
        except ValueError:
            _fail(path, line, f"features.{name}: expected a string, a finite number or a boolean, got {value!r}")
    return texts
