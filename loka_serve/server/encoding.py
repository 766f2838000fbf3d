"""JSON bytes of answers, with one encoder for all."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """UTF-8 JSON of structs, dicts, lists and scalars."""
    return _encoder.encode(value)


def json_response(value: Any, status: int = 200) -> Response:
    """An answer whose bytes are ready: nothing is left for the framework to serialise."""
    return Response(encode(value), status, media_type="application/json")
