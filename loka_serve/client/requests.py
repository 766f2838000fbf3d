"""What the client sends: the fields of a request, and the HTTP requests that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

RECOMMEND, RECOMMEND_BATCH = "/v1/recommend", "/v1/recommend/batch"
MODELS, CATALOG, ROLLBACK, READY = "/v1/models", "/v1/catalog", "/v1/catalog/rollback", "/health/ready"


class RequestFields(TypedDict, total=False):
    """A request; exactly one of `history` and `history_sids`. The server's /docs tell each field and its limits."""

    user_id: str | None
    history: Sequence[str] | None
    history_sids: Sequence[Sequence[int]] | None
    features: Mapping[str, str]
    num_items: int | None
    beam_width: int | None
    exclude: Sequence[str]
    exclude_history: bool
    filter: Mapping[str, Sequence[str | int | float | bool]]
    fields: Sequence[str]
    priority: Literal["interactive", "bulk"]
    timeout_ms: float | None


@dataclass(frozen=True)
class Call:
    """One HTTP request, which may be sent more than once.

    Attributes:
        file: its content is the body.
        is_repeatable: whether it may be sent again when nobody knows what became of it.
    """

    method: str
    path: str
    body: bytes | None = None
    file: Path | None = None
    is_repeatable: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """Of this one alone."""
        return {} if self.file is None else {"content-type": "application/octet-stream"}


ROLL_BACK = Call("POST", ROLLBACK, is_repeatable=False)  # twice would be forward again


def recommend_call(fields: RequestFields) -> Call:
    """POST /v1/recommend."""
    return Call("POST", RECOMMEND, encode(fields))


def batch_call(requests: Sequence[RequestFields]) -> Call:
    """POST /v1/recommend/batch."""
    return Call("POST", RECOMMEND_BATCH, encode({"requests": list(requests)}))


def encode(value: Any) -> bytes:
    """JSON; numpy's arrays and numbers count as lists and numbers."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"expected what JSON can hold, got {type(value).__name__}")


def headers_of(api_key: str | None, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of every request of a client."""
    made = {"content-type": "application/json", "accept": "application/json", **(headers or {})}
    if api_key is not None:
        made["authorization"] = f"Bearer {api_key}"
    return made
