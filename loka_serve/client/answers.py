"""What the server answers, typed; members that a newer server adds are left aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from loka_serve.client.errors import NoAnswer, RequestFailed, failure_of

Answer = TypeVar("Answer")


class Item(Struct, frozen=True):
    """A recommended item.

    Attributes:
        score: log-probability of its semantic ID.
        rank: from 1, the best.
        attributes: those that were asked for with `fields`; None where the item has none.
    """

    item_id: str
    score: float
    semantic_id: list[int]
    rank: int
    attributes: dict[str, Any] = {}


class Usage(Struct, frozen=True):
    """What a request took; times in milliseconds."""

    history_length: int
    unknown_items: int
    beam_width: int
    batch_size: int
    queue_ms: float
    engine_ms: float
    total_ms: float


class Recommendation(Struct, frozen=True):
    """Items, best first.

    Attributes:
        complete: False if fewer items exist under the filter than were asked for.
    """

    request_id: str
    model: str
    catalog_version: str
    items: list[Item]
    complete: bool
    usage: Usage


class Feature(Struct, frozen=True):
    """A static user feature that the model knows."""

    name: str
    values: list[str]


class Limits(Struct, frozen=True):
    """Largest values of a request."""

    max_batch: int
    max_beam_width: int
    max_context: int


class Model(Struct, frozen=True):
    """A served model; engine and device are None while it starts."""

    name: str
    levels: int
    codebook_sizes: list[int]
    beam_width: int
    features: list[Feature]
    limits: Limits
    engine: str | None = None
    device: str | None = None


class Attribute(Struct, frozen=True):
    """An item attribute that requests may filter by and ask for."""

    name: str
    distinct_values: int


class CatalogInfo(Struct, frozen=True):
    """The live catalog."""

    version: str
    items: int
    semantic_ids: int
    levels: int
    codebook_sizes: list[int]
    attributes: list[Attribute]
    previous_version: str | None = None


class _Models(Struct, frozen=True):
    models: list[Model]


class _Raw(Struct, frozen=True):
    """A recommendation whose items are still as they came, since attributes stand beside their members."""

    request_id: str
    model: str
    catalog_version: str
    items: list[dict[str, Any]]
    complete: bool
    usage: Usage


class _RawBatch(Struct, frozen=True):
    responses: list[msgspec.Raw]


_MEMBERS = ("item_id", "score", "semantic_id", "rank")


def recommendation(body: bytes | msgspec.Raw) -> Recommendation:
    """One answer; raises NoAnswer if it is none."""
    raw = decode(body, _Raw)
    items = []
    for given in raw.items:
        members = {name: given.pop(name, None) for name in _MEMBERS}
        try:
            items.append(msgspec.convert({**members, "attributes": given}, Item))
        except msgspec.ValidationError as error:
            raise NoAnswer(f"the answer is not as expected: items: {error}") from None
    return Recommendation(raw.request_id, raw.model, raw.catalog_version, items, raw.complete, raw.usage)


def recommendations(body: bytes) -> list[Recommendation | RequestFailed]:
    """The answers of a batch: an element that failed alone is the error that it would raise alone."""
    answers: list[Recommendation | RequestFailed] = []
    for element in decode(body, _RawBatch).responses:
        status = decode(element, _Status).status
        answers.append(recommendation(element) if status is None else failure_of(status, bytes(element), {}))
    return answers


class _Status(Struct, frozen=True):
    """Tells a problem, which has a status, from a recommendation."""

    status: int | None = None


def models(body: bytes) -> Sequence[Model]:
    """The served models."""
    return decode(body, _Models).models


def decode(body: bytes | msgspec.Raw, kind: type[Answer]) -> Answer:
    """JSON as `kind`; raises NoAnswer if it is something else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise NoAnswer(f"the answer is not as expected: {error}") from None
