"""The JSON bodies of the HTTP interface: the decoders check these types and ranges, and the OpenAPI page shows them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

LARGEST_CODE = 2**31 - 2
LONGEST_TIMEOUT_MS = 600_000

ItemId = Annotated[str, Meta(min_length=1, max_length=512)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Code = Annotated[int, Meta(ge=0, le=LARGEST_CODE)]
SemanticId = Annotated[list[Code], Meta(min_length=2, max_length=5)]
MOST_FILTER_VALUES = 100_000  # of one attribute: each costs a look-up on the event loop
FilterValues = Annotated[list[str | int | float | bool], Meta(min_length=1, max_length=MOST_FILTER_VALUES)]


class RecommendRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What to recommend, and to whom. Exactly one of `history` and `history_sids` must be given; it may be empty."""

    user_id: Annotated[str, Meta(max_length=512, description="For the caller's own use; not stored.")] | None = None
    history: (
        Annotated[
            list[ItemId],
            Meta(
                description="Item ids, oldest first. Unknown ones are dropped and counted; of a history longer than "
                "the model's context the newest items are used.",
            ),
        ]
        | None
    ) = None
    history_sids: (
        Annotated[list[SemanticId], Meta(description="The same as semantic IDs; they need not be in the catalog.")]
        | None
    ) = None
    features: Annotated[
        dict[str, str],
        Meta(
            description="Static user features by name (GET /v1/models lists them). An unknown value counts as missing."
        ),
    ] = {}
    num_items: Annotated[int, Meta(ge=1, description="Items to return; 20 by default.")] | None = None
    beam_width: (
        Annotated[int, Meta(ge=1, description="Beams of the search, at least num_items; the model's own by default.")]
        | None
    ) = None
    exclude: Annotated[list[ItemId], Meta(description="Items not to return. Unknown ones are ignored.")] = []
    exclude_history: Annotated[bool, Meta(description="Do not return items of the history.")] = False
    filter: Annotated[
        dict[str, FilterValues],
        Meta(description="attribute -> values: an item must have one of the values of every attribute named."),
    ] = {}
    fields: Annotated[list[Name], Meta(description="Item attributes to put into the answer's items.")] = []
    priority: Annotated[
        Literal["interactive", "bulk"],
        Meta(description="While both wait, bulk requests get a tenth of the engine's time; alone all of it."),
    ] = "interactive"
    timeout_ms: (
        Annotated[float, Meta(ge=1, le=LONGEST_TIMEOUT_MS, description="The answer is 504 when it takes longer.")]
        | None
    ) = None


class RecommendBatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that are decoded one by one, so that a malformed one fails alone."""

    requests: Annotated[list[msgspec.Raw], Meta(min_length=1)]


class RecommendedItem(Struct, frozen=True):
    """An item of the answer, with the attributes asked for beside these members (null where the item has none)."""

    item_id: str
    score: Annotated[float, Meta(description="Log-probability of the item's semantic ID.")]
    semantic_id: list[int]
    rank: Annotated[int, Meta(ge=1, description="1 is the best.")]


class Usage(Struct, frozen=True):
    """What the request took."""

    history_length: Annotated[int, Meta(ge=0, description="Items of the history that the model saw.")]
    unknown_items: Annotated[int, Meta(ge=0, description="Items of the history that are not in the catalog.")]
    beam_width: Annotated[int, Meta(ge=1)]
    batch_size: Annotated[int, Meta(ge=1, description="Requests that were computed together.")]
    queue_ms: Annotated[float, Meta(ge=0, description="From arrival to the engine.")]
    engine_ms: Annotated[float, Meta(ge=0, description="The engine's time for the whole batch.")]
    total_ms: Annotated[float, Meta(ge=0, description="From arrival to the answer.")]


class RecommendResponse(Struct, frozen=True):
    """Recommended items, best first."""

    request_id: str
    model: str
    catalog_version: str
    items: list[RecommendedItem]
    complete: Annotated[bool, Meta(description="False if fewer items exist under the filter than were asked for.")]
    usage: Usage


class Feature(Struct, frozen=True):
    """A static user feature that the model knows."""

    name: str
    values: list[str]


class ModelLimits(Struct, frozen=True):
    """Largest values of a request."""

    max_batch: int
    max_beam_width: int
    max_context: int


class Model(Struct, frozen=True):
    """A served model."""

    name: str
    engine: Annotated[str, Meta(description="null while it starts")] | None
    device: str | None
    levels: int
    codebook_sizes: list[int]
    beam_width: Annotated[int, Meta(description="Default of a request.")]
    features: list[Feature]
    limits: ModelLimits


class ModelList(Struct, frozen=True):
    """The served models; there is one."""

    models: list[Model]


class CatalogAttribute(Struct, frozen=True):
    """An item attribute that requests may filter by and ask for."""

    name: str
    distinct_values: int


class CatalogInfo(Struct, frozen=True):
    """The live catalog."""

    version: Annotated[str, Meta(description="Hash of the catalog's content.")]
    items: int
    semantic_ids: int
    levels: int
    codebook_sizes: list[int]
    attributes: list[CatalogAttribute]
    previous_version: Annotated[str, Meta(description="What a rollback would bring back.")] | None = None


class BatchInfo(Struct, frozen=True):
    """A batch that is over; lists have one figure for each of its requests."""

    batch_id: int
    catalog_version: str
    seconds_ago: float
    size: int
    failed: Annotated[int, Meta(description="Requests of it that got no items.")]
    lost: Annotated[str, Meta(description="Why the engine never answered it; null if it did.")] | None
    beam_widths: list[int]
    queue_ms: Annotated[list[float], Meta(description="From each request's arrival to the batch's start.")]
    round_trip_ms: Annotated[
        float, Meta(description="From the batch's start to its answer, as the API process saw it.")
    ]
    stages_ms: Annotated[
        dict[str, float],
        Meta(
            description="By stage; `total` is the engine's whole time, `decode.0` the first level's part of `decode`."
        ),
    ]


class BatchList(Struct, frozen=True):
    """The last batches, newest first."""

    batches: list[BatchInfo]


class Health(Struct, frozen=True):
    """The state of the server in one word."""

    status: str
