"""Mutations that keep a body mostly what it was: bytes changed at random, or one value of its JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.fuzz.target import INFER_BINARY

SIZE_BYTES = 2  # of the length of the JSON, before a body with binary data
TOKENS = (
    *(b'"', b"[", b"]", b"{", b"}", b":", b",", b"\\u", b"\\", b"\xff", b"\0", b"null", b"1e400", b"NaN", b"-0"),
    *(b"9" * 400, b"[" * 200, b'"history":', b'"a":1,', b"\xed\xa0\x80"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 64, 65, 2**31 - 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *("", "a", "item-1", "x" * 513, "\0", "\u00fc", "\ud83d\ude00", '{"kind":["odd"]}', "{", "BYTES", "INT32", "INT64"),
    *([], [[]], {}, ["item-1"], [1, 2, 3], [[1, 2, 3]], [[0, 0, 0]] * 60, ["item-1"] * 70, {"kind": ["odd"]}),
)


def mutate_bytes(data: bytes, source: random.Random) -> bytes:
    """A few bytes changed, left out, doubled or put in."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 4)):
        begin = source.randrange(len(changed) + 1)
        end = min(len(changed), begin + source.randint(0, 8))
        kind = source.randrange(4)
        if kind == 0:
            del changed[begin:end]
        elif kind == 1:
            changed[begin:begin] = source.choice(TOKENS)
        elif kind == 2:
            changed[begin:begin] = changed[begin:end]
        else:
            changed[begin:end] = source.randbytes(end - begin)
    return bytes(changed)


def mutate_json(data: bytes, source: random.Random) -> bytes | None:
    """One value of the JSON replaced, left out, doubled or moved; None if there is no JSON to change."""
    route, body, binary = data[:1], data[1:], b""
    has_size = bool(route) and route[0] % 4 == INFER_BINARY
    if has_size:
        size = int.from_bytes(body[:SIZE_BYTES], "little")
        body, binary = body[SIZE_BYTES : SIZE_BYTES + size], body[SIZE_BYTES + size :]
    try:
        tree = [json.loads(body)]
    except (ValueError, RecursionError):
        return None
    holders = _holders(tree)
    holder = source.choice(holders)
    if isinstance(holder, dict):
        key = source.choice([*holder]) if holder else "history"
        _change(holder, key, source.choice(holders), source)
    else:
        _change(holder, source.randrange(len(holder)) if holder else None, source.choice(holders), source)
    if not tree:
        return None
    body = json.dumps(tree[0], ensure_ascii=source.random() < 0.5).encode(errors="surrogatepass")
    return route + (min(len(body), 65_535).to_bytes(SIZE_BYTES, "little") if has_size else b"") + body + binary


def _change(holder: Any, key: Any, other: Any, source: random.Random) -> None:
    kind = source.randrange(4)
    if key is None:
        holder.append(source.choice(VALUES))
    elif kind == 0:
        holder.pop(key, None) if isinstance(holder, dict) else holder.pop(key)
    elif kind == 1 and isinstance(holder, list):
        holder.extend([holder[key]] * source.choice((1, 2, 60)))
    elif kind == 2:
        holder[key] = json.loads(json.dumps(other))  # a copy of another part, or of the whole
    else:
        holder[key] = source.choice(VALUES)


def _holders(tree: list[Any]) -> list[Any]:
    """All lists and objects in a tree, itself among them."""
    found: list[Any] = []
    left: list[Any] = [tree]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            found.append(value)
            left.extend(value.values() if isinstance(value, dict) else value)
    return found
