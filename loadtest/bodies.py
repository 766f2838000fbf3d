"""Requests to send, encoded before the clock starts: from user histories, or ready-made bodies of a file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from loka_serve.catalog.histories import History, read_histories
from loka_serve.errors import LokaError

MOST_BODIES = 2_000
"""Kept of a file: 3,000 items a history are about 40 KB, and each sending process holds all bodies."""


@dataclass(frozen=True)
class Template:
    """One request that is sent again and again.

    Attributes:
        body: JSON of POST /v1/recommend.
        name: under which its figures are told apart from those of others.
        headers: beside those of every request, for example a tenant's.
        num_items: what a right answer has (or says that fewer exist); 0: any answer of status 200 is right.
    """

    body: bytes
    name: str = "recommend"
    headers: tuple[tuple[str, str], ...] = ()
    num_items: int = 0


def template(fields: dict[str, Any], name: str = "recommend", headers: Iterable[tuple[str, str]] = ()) -> Template:
    """The request with these fields; its answer is held to `num_items` of them."""
    return Template(orjson.dumps(fields), name, tuple(headers), int(fields.get("num_items", 0)))


def from_histories(
    histories: Sequence[History],
    num_items: int = 10,
    beams: Sequence[int] = (),
    exclude_history: bool = False,
    timeout_ms: float | None = None,
    name: str = "recommend",
    headers: Iterable[tuple[str, str]] = (),
) -> list[Template]:
    """One request for each history; the beam widths take turns, none leaves them to the server."""
    headers = tuple(headers)
    templates = []
    for index, history in enumerate(histories):
        fields: dict[str, Any] = {
            "user_id": history.user_id,
            "history": history.items,
            "features": history.features,
            "num_items": num_items,
        }
        if beams:
            fields["beam_width"] = beams[index % len(beams)]
        if exclude_history:
            fields["exclude_history"] = True
        if timeout_ms is not None:
            fields["timeout_ms"] = timeout_ms
        templates.append(template(fields, name, headers))
    return templates


def read_some_histories(path: Path, most: int = MOST_BODIES, seed: int = 0, scanned: int = 50_000) -> list[History]:
    """`most` histories of a file, drawn at random from its first `scanned`.

    Raises:
        LokaError: the file is not one of histories, or holds none.
    """
    histories = list(itertools.islice(read_histories(path), scanned))
    if not histories:
        raise LokaError(f"{path}: no histories")
    return random.Random(seed).sample(histories, min(most, len(histories)))


def read_bodies(path: Path, most: int = MOST_BODIES) -> list[Template]:
    """Request bodies as they stand, one JSON object a line.

    Raises:
        LokaError: naming the line that is no JSON object, or a file without any.
    """
    templates = []
    with path.open("rb") as lines:
        for number, line in enumerate(itertools.islice(lines, most), 1):
            try:
                fields = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise LokaError(f"{path}:{number}: expected a JSON object: {error}") from None
            if not isinstance(fields, dict):
                raise LokaError(f"{path}:{number}: expected a JSON object, got {type(fields).__name__}")
            items = fields.get("num_items", 0)
            if not isinstance(items, int):
                raise LokaError(f"{path}:{number}: num_items: expected a whole number, got {items!r}")
            templates.append(Template(line.strip(), num_items=items))
    if not templates:
        raise LokaError(f"{path}: no request bodies")
    return templates
