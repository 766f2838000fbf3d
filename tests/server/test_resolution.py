"""From names to indices: defaults, limits, and 422 for what the model or the catalog does not know."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest

from loka_serve.server.messages import unpack_integers
from loka_serve.server.problems import ProblemError
from loka_serve.server.resolution import ResolvedRequest, resolve
from loka_serve.server.schemas import RecommendRequest
from tests.server.scripted_server import make_catalog, make_model

CATALOG = make_catalog()
MODEL = make_model()


def resolved(**body: Any) -> ResolvedRequest:
    return resolve(msgspec.convert(body, RecommendRequest), MODEL, CATALOG)


def history_of(request: ResolvedRequest) -> list[list[int]]:
    return unpack_integers(request.wire.history).reshape(-1, 3).tolist()


def test_history_items_become_codes_oldest_first_and_unknown_ones_are_dropped_and_counted() -> None:
    request = resolved(history=["item-7", "nobody-knows", "item-0", "item-7"])
    codes = [list(CATALOG.semantic_id(CATALOG.index_of(item) or 0)) for item in ("item-7", "item-0", "item-7")]
    assert history_of(request) == codes
    assert (request.history_length, request.unknown_items) == (3, 1)


def test_a_long_history_keeps_its_newest_items() -> None:
    items = [f"item-{index}" for index in range(60)]
    request = resolved(history=["unknown", *items])
    assert history_of(request) == CATALOG.semantic_ids([CATALOG.index_of(item) or 0 for item in items[-50:]]).tolist()
    assert (request.history_length, request.unknown_items) == (50, 1)
    codes = [[index, 0, 0] for index in range(60)]
    assert history_of(resolved(history_sids=codes)) == codes[-50:]


def test_an_empty_history_is_allowed() -> None:
    for body in ({"history": []}, {"history_sids": []}, {"history": ["unknown"]}):
        assert history_of(resolved(**body)) == []


@pytest.mark.parametrize(
    ("body", "widths"),
    [
        ({}, (20, 20)),  # the model's 16 beams would be too few for 20 items
        ({"num_items": 5}, (5, 16)),
        ({"num_items": 40}, (40, 40)),
        ({"num_items": 5, "beam_width": 5}, (5, 5)),
        ({"num_items": 5, "beam_width": 64}, (5, 64)),
    ],
)
def test_items_and_beams(body: dict[str, Any], widths: tuple[int, int]) -> None:
    wire = resolved(history=[], **body).wire
    assert (wire.num_items, wire.beam_width) == widths


def test_exclusions_are_item_indices() -> None:
    def excluded(**body: Any) -> list[str]:
        indices = unpack_integers(resolved(**body).wire.exclude)
        return sorted(CATALOG.item_ids[index] for index in indices)

    assert excluded(history=["item-1"]) == []
    assert excluded(history=["item-1"], exclude=["item-3", "unknown"]) == ["item-3"]
    assert excluded(history=["item-1"], exclude=["item-3"], exclude_history=True) == ["item-1", "item-3"]
    # All of a long history, not only what the model sees.
    assert len(excluded(history=[f"item-{index}" for index in range(60)], exclude_history=True)) == 60
    # item-4 and item-5 share a semantic ID; one that the catalog lacks excludes nothing.
    shared = CATALOG.semantic_id(CATALOG.index_of("item-4") or 0)
    assert CATALOG.semantic_id(CATALOG.index_of("item-5") or 0) == shared
    assert excluded(history_sids=[list(shared), [9, 9, 9]], exclude_history=True) == ["item-4", "item-5"]


def test_half_a_million_semantic_ids_are_resolved_at_once() -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(0, (9, 16, 7), (500_000, 3))
    body = RecommendRequest(history_sids=codes.tolist(), exclude_history=True)
    started = time.thread_time()
    request = resolve(body, MODEL, CATALOG)
    assert time.thread_time() - started < 1.5  # about 0.15 s on an idle core; a Python loop takes more than 3 s
    given = set(map(tuple, codes.tolist()))
    expected = [index for index in range(CATALOG.item_count) if CATALOG.semantic_id(index) in given]
    assert unpack_integers(request.wire.exclude).tolist() == expected
    assert history_of(request) == codes[-50:].tolist()


def test_many_exclusions_are_each_sent_once() -> None:
    request = resolved(history=["item-3"] * 1000, exclude=["item-5", "item-3"] * 1000, exclude_history=True)
    assert unpack_integers(request.wire.exclude).tolist() == sorted(
        index for index in map(CATALOG.index_of, ("item-3", "item-5")) if index is not None
    )
    assert (request.history_length, request.unknown_items) == (50, 0)


def test_features_become_indices_with_0_for_unknown() -> None:
    assert resolved(history=[]).wire.features == [0, 0]
    assert resolved(history=[], features={"region": "south"}).wire.features == [0, 2]
    assert resolved(history=[], features={"age": "young", "region": "elsewhere"}).wire.features == [1, 0]


def test_predicates_become_attribute_texts() -> None:
    request = resolved(history=[], filter={"kind": ["odd"], "price": [1, 2.5, 3.0, 1.0, True, "1", 77]})
    assert request.wire.predicates == {"kind": ["odd"], "price": ["1", "2.5", "3"]}
    # What no item has matches nothing, also when there is nothing else.
    assert resolved(history=[], filter={"kind": ["neither"]}).wire.predicates == {"kind": []}


def test_fields_are_kept_once_each() -> None:
    assert resolved(history=[], fields=["price", "kind", "price"]).fields == ("price", "kind")


def test_timeout_is_as_asked_for() -> None:
    assert resolved(history=[], timeout_ms=250).timeout_ms == 250
    assert resolved(history=[]).timeout_ms is None


UNKNOWN_ATTRIBUTE = "unknown attribute; known attributes: kind, price, tags"


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "history", "expected history or history_sids (empty for a new user), got neither"),
        ({"history": [], "history_sids": []}, "history_sids", "expected either history or history_sids, got both"),
        ({"history": [], "num_items": 65}, "num_items", "expected 1 to 64, got 65"),
        ({"history": [], "beam_width": 65}, "beam_width", "expected 1 to 64, got 65"),
        ({"history": [], "beam_width": 8}, "beam_width", "expected at least num_items = 20, got 8"),
        ({"history": [], "num_items": 9, "beam_width": 8}, "beam_width", "expected at least num_items = 9, got 8"),
        ({"history_sids": [[1, 2, 3], [1, 2]]}, "history_sids[1]", "expected 3 codes, got 2"),
        ({"history_sids": [[1, 16, 3]]}, "history_sids[0][1]", "expected 0 to 15, got 16"),
        ({"history": [], "features": {"a": "b"}}, "features.a", "unknown feature; known features: age, region"),
        (
            {"history": [], "filter": {"colour": ["red"]}},
            "filter.colour",
            UNKNOWN_ATTRIBUTE,
        ),
        ({"history": [], "fields": ["kind", "x"]}, "fields[1]", UNKNOWN_ATTRIBUTE),
        ({"history": [], "fields": ["score"]}, "fields[0]", UNKNOWN_ATTRIBUTE),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(body: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        resolved(**body)
    assert caught.value.kind.status == 422
    assert [(error.field, error.message) for error in caught.value.errors] == [(field, message)]


def test_arrays_cross_as_little_endian_int32() -> None:
    wire = resolved(history=["item-0"]).wire
    assert np.frombuffer(wire.history, "<i4").tolist() == list(CATALOG.semantic_id(CATALOG.index_of("item-0") or 0))
