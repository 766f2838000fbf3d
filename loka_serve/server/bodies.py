"""Request bodies: read with a bound while they stream, decoded strictly, and every refusal names the field."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from loka_serve.server.problems import (
    BODY_TIMEOUT,
    CANCELLED,
    QUEUE_FULL,
    TOO_LARGE,
    UNSUPPORTED_ENCODING,
    ProblemError,
    invalid,
)
from loka_serve.server.schemas import FilterValues, RecommendBatchRequest, RecommendRequest

Body = TypeVar("Body")

# After a refusal the rest of the body is read and thrown away up to this much, so that a client that sends before it
# reads gets the answer instead of a broken connection.
DISCARD_BYTES = 1 << 20
SMALL_BODY_BYTES = 64 << 10
ROOM_RETRY_SECONDS = 1.0
MOST_KEYS = 10_000  # of a mapping, to look through for the one to name


class _Mappings(msgspec.Struct):
    """The members of a request whose keys the client chooses, undecoded: to find the key of a refused value."""

    filter: msgspec.Raw = msgspec.Raw(b"{}")
    features: msgspec.Raw = msgspec.Raw(b"{}")


_recommend_decoder = msgspec.json.Decoder(RecommendRequest)
_batch_decoder = msgspec.json.Decoder(RecommendBatchRequest)
_mappings_decoder = msgspec.json.Decoder(_Mappings)
_mapping_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_value_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    "filter": msgspec.json.Decoder(FilterValues),
    "features": msgspec.json.Decoder(str),
}
_DEFAULTS = [
    (field.name, field.default_factory() if field.default is msgspec.NODEFAULT else field.default)
    for field in msgspec.structs.fields(RecommendRequest)
]
_PATH = re.compile(r"^(?P<message>.*?) - at `(?P<key>key in )?\$(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN = "Object contains unknown field `"  # NAME and a last backtick follow; no struct has another one inside


@dataclass
class ReadingRoom:
    """Memory for bodies that are still arriving: those beyond `SMALL_BODY_BYTES` share it."""

    most: int
    taken: int = 0

    def take(self, size: int) -> None:
        """Raises ProblemError (429) if there is no room."""
        if self.taken + size > self.most:
            raise ProblemError(QUEUE_FULL, "too many large bodies are being read", retry_after=ROOM_RETRY_SECONDS)
        self.taken += size


async def read_body(request: Request, limit: int, timeout: float, room: ReadingRoom) -> bytes:
    """The whole body, counted while it streams.

    Raises:
        ProblemError: 413 above `limit` bytes, 408 after `timeout` seconds, 415 if compressed, 429 if other bodies fill
            the room, 499 if the client left.
    """
    check_encoding(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit and "expect" in request.headers:
        raise too_large(limit)  # the client waits for a word before it sends
    chunks: list[bytes] = []
    size = large = 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    if size > SMALL_BODY_BYTES:
                        room.take(len(chunk))
                        large += len(chunk)
                    chunks.append(chunk)
                    continue
                chunks.clear()
                if size > limit + DISCARD_BYTES:
                    break
    except TimeoutError:
        raise ProblemError(BODY_TIMEOUT, f"the body did not arrive within {timeout:g} s") from None
    except ClientDisconnect:
        raise ProblemError(CANCELLED, "the client went away while sending") from None
    finally:
        room.taken -= large
    if size > limit:
        raise too_large(limit)
    return b"".join(chunks)


def check_encoding(request: Request) -> None:
    """Refuse compressed bodies: their size is not known before they are unpacked. Raises ProblemError (415)."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ProblemError(UNSUPPORTED_ENCODING, "content-encoding: expected identity; compressed bodies are not read")


def too_large(limit: int) -> ProblemError:
    """413."""
    return ProblemError(TOO_LARGE, f"the body is larger than {limit} bytes")


def decode_recommend(body: bytes | msgspec.Raw) -> RecommendRequest:
    """A recommend request; raises ProblemError (422) naming the field."""
    request = decode_json(_recommend_decoder, body)
    given = sum(getattr(request, name) != default for name, default in _DEFAULTS)
    refuse_repeated_keys(body, given + len(request.features) + len(request.filter))
    return request


def decode_batch(body: bytes) -> RecommendBatchRequest:
    """A batch whose elements are still undecoded; raises ProblemError (422) if the batch itself is malformed."""
    batch = decode_json(_batch_decoder, body)
    if body.count(b":") != 1 + sum(bytes(element).count(b":") for element in batch.requests):
        raise _repeated("requests")  # the elements are looked at one by one
    return batch


def refuse_repeated_keys(body: bytes | msgspec.Raw, distinct: int) -> None:
    """Refuse JSON that gives a key twice, of which decoders take the last without a word.

    Each key has a colon after it, so with no more colons than there are distinct keys none can be there twice: only
    where texts hold colons, or defaults are spelled out, does Python's own decoder have to look.

    Args:
        body: JSON that was decoded without a complaint.
        distinct: keys that are in it for sure.

    Raises:
        ProblemError: 422.
    """
    data = bytes(body)
    if data.count(b":") <= distinct:
        return
    try:
        json.loads(data.decode(), object_pairs_hook=_each_once)
    except (ValueError, RecursionError):  # a text that no other decoder could read in the same way
        raise invalid("body", "expected JSON") from None


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _repeated(name)
        names.add(name)


def _repeated(name: str) -> ProblemError:
    return invalid("body", f"expected each key once, got `{name[:100]}` again")


def decode_json(decoder: msgspec.json.Decoder[Body], body: bytes | msgspec.Raw) -> Body:
    """What every byte that a client wrote goes through; raises ProblemError (422) and nothing else."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
    except msgspec.DecodeError as error:
        raise invalid("body", f"expected JSON: {_lower(str(error))}") from None
    except UnicodeError:
        raise invalid("body", "expected UTF-8 text") from None
    except RecursionError:
        raise invalid("body", "nested too deeply") from None
    raise invalid(*_describe(text, body))


def _describe(text: str, body: bytes | msgspec.Raw) -> tuple[str, str]:
    """(field, message) of a text like "Expected `int` >= 1 - at `$.num_items`"."""
    field, message = field_of(text)
    return _resolve_key(field, body) if "[...]" in field else field, message


def field_of(text: str) -> tuple[str, str]:
    """(field, message) of a validation error of msgspec, with `[...]` for a key of a mapping; `body` for the whole."""
    if text.startswith(_UNKNOWN):  # by hand: the name is the client's and may be megabytes long
        return text[len(_UNKNOWN) : -1][:100], "unknown field"
    match = _PATH.match(text)
    if match is None:
        return "body", _lower(text)
    return match["path"].lstrip(".") or "body", _lower(match["message"])


def _resolve_key(path: str, body: bytes | msgspec.Raw) -> str:
    """msgspec writes `[...]` for a key of a mapping: find the first key whose value does not fit. For refusals only.

    The decoder stopped at that value, so what follows it may be anything.

    Raises:
        ProblemError: 422 naming `body`, if it is not JSON to its end or gives a key twice.
    """
    member, _, rest = path.partition("[...]")
    decoder = _value_decoders.get(member)
    if decoder is None:
        return path
    mapping: msgspec.Raw = getattr(decode_json(_mappings_decoder, body), member)
    if bytes(memoryview(mapping)[:1]) == b"{":
        values = decode_json(_mapping_decoder, mapping)
        if len(values) > MOST_KEYS:
            return member
        for key, value in values.items():
            try:
                decoder.decode(value)
            except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
                return f"{member}.{key[:100]}{rest}"
    raise invalid("body", f"expected each key once, got `{member}` or a key of it again")


def _lower(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]  # "JSON ..." stays
