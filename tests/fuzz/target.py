"""What is fuzzed: any bytes as the body of any of the routes, up to the frame that the engine process would get.

The first byte chooses the route. A refusal is a ProblemError of status 422; all else that is raised is a fault.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from loka_serve.catalog.catalog import Catalog
from loka_serve.server.bodies import decode_batch, decode_recommend
from loka_serve.server.kserve_tensors import decode_inference
from loka_serve.server.messages import Batch, decode_to_engine, encode
from loka_serve.server.problems import INVALID, LONGEST_TEXT, ProblemError
from loka_serve.server.resolution import ServedModel, resolve
from loka_serve.server.schemas import RecommendRequest
from tests.server.scripted_server import make_catalog, make_model

RECOMMEND, BATCH, INFER, INFER_BINARY = range(4)
MOST_ELEMENTS = 8


@cache
def served() -> tuple[ServedModel, Catalog]:
    return make_model(), make_catalog()


def fuzz_one(data: bytes) -> str:
    """Take any bytes as a request; gives the name of the field that it was refused for, or `ok`."""
    route, body = (data[0] % 4, data[1:]) if data else (RECOMMEND, b"")
    try:
        if route == RECOMMEND:
            accept(decode_recommend(body))
            assert_keys_once(body)
        elif route == BATCH:
            for element in decode_batch(body).requests[:MOST_ELEMENTS]:
                accept(decode_recommend(element))
                assert_keys_once(bytes(element))
        elif route == INFER:
            accept(decode_inference(body, None, 3).request)
            assert_keys_once(body)
        else:
            size = int.from_bytes(body[:2], "little")
            accept(decode_inference(body[2:], str(size), 3).request)
            assert_keys_once(body[2 : 2 + size])
    except ProblemError as error:
        assert error.kind is INVALID and error.errors, error
        assert len(error.detail) <= LONGEST_TEXT
        json.dumps(error.problem("id").errors[0].field)
        return error.errors[0].field
    return "ok"


def accept(request: RecommendRequest) -> None:
    """What follows on decoding: limits, names to indices, and the way to the engine process and back."""
    model, catalog = served()
    wire = resolve(request, model, catalog).wire
    assert 1 <= wire.num_items <= wire.beam_width <= model.max_beam_width
    assert len(wire.history) <= 4 * 3 * model.max_context
    batch = Batch(1, catalog.version, [wire])
    assert decode_to_engine(encode(batch)) == batch


def assert_keys_once(body: bytes) -> None:
    """Of what was accepted, by a decoder that knows nothing of ours."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    json.loads(body, object_pairs_hook=once)
