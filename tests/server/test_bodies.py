"""Decoding of request bodies: every refusal is a 422 that names the field by its path."""

from __future__ import annotations

import time

import pytest

from loka_serve.server.bodies import decode_batch, decode_recommend
from loka_serve.server.problems import ProblemError
from loka_serve.server.schemas import MOST_FILTER_VALUES


def test_a_full_request_is_decoded() -> None:
    request = decode_recommend(
        b'{"user_id": "u1", "history": ["a", "b"], "features": {"age": "old"}, "num_items": 3, "beam_width": 16,'
        b' "exclude": ["c"], "exclude_history": true, "filter": {"kind": ["odd"], "price": [1, 2.5], "new": [true]},'
        b' "fields": ["kind"], "timeout_ms": 200}'
    )
    assert (request.user_id, request.history, request.num_items, request.beam_width) == ("u1", ["a", "b"], 3, 16)
    assert request.filter == {"kind": ["odd"], "price": [1, 2.5], "new": [True]}
    assert (request.exclude, request.exclude_history, request.fields) == (["c"], True, ["kind"])
    assert (request.features, request.timeout_ms, request.history_sids) == ({"age": "old"}, 200.0, None)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (b"", "body", "expected JSON: input data was truncated"),
        (b"{", "body", "expected JSON: input data was truncated"),
        (b'{"history": NaN}', "body", "expected JSON: JSON is malformed: invalid character (byte 12)"),
        (b"[]", "body", "expected `object`, got `array`"),
        (b'{"history": ["\xff"]}', "body", "expected JSON: invalid UTF-8 encoded string"),
        (b'{"history": 3}', "history", "expected `array | null`, got `int`"),
        (b'{"history": ["a", 3]}', "history[1]", "expected `str`, got `int`"),
        (b'{"history": [""]}', "history[0]", "expected `str` of length >= 1"),
        (b'{"history_sids": [[1, 2, 3], [1, -1, 3]]}', "history_sids[1][1]", "expected `int` >= 0"),
        (b'{"history_sids": [[1]]}', "history_sids[0]", "expected `array` of length >= 2"),
        (b'{"history_sids": [[1, 2, 99999999999999999999]]}', "history_sids[0][2]", "expected `int` <= 2147483646"),
        (b'{"history_sids": [[1, 2.5, 3]]}', "history_sids[0][1]", "expected `int`, got `float`"),
        (b'{"num_items": 0}', "num_items", "expected `int` >= 1"),
        (b'{"num_items": "5"}', "num_items", "expected `int | null`, got `str`"),
        (b'{"num_items": true}', "num_items", "expected `int | null`, got `bool`"),
        (b'{"num_items": 1e400}', "num_items", "number out of range"),
        (b'{"beam_width": -3}', "beam_width", "expected `int` >= 1"),
        (b'{"exclude": "a"}', "exclude", "expected `array`, got `str`"),
        (b'{"exclude_history": 1}', "exclude_history", "expected `bool`, got `int`"),
        (b'{"features": {"a": "x", "age": 3}}', "features.age", "expected `str`, got `int`"),
        (b'{"filter": {"a": ["x"], "kind": "odd"}}', "filter.kind", "expected `array`, got `str`"),
        (b'{"filter": {"a": ["x"], "kind": []}}', "filter.kind", "expected `array` of length >= 1"),
        (
            b'{"filter": {"kind": ["x", null]}}',
            "filter.kind[1]",
            "expected `bool | int | float | str`, got `null`",
        ),
        (b'{"filter": null}', "filter", "expected `object`, got `null`"),
        (b'{"fields": [7]}', "fields[0]", "expected `str`, got `int`"),
        (b'{"timeout_ms": 0}', "timeout_ms", "expected `float` >= 1.0"),
        (b'{"timeout_ms": 1e9}', "timeout_ms", "expected `float` <= 600000.0"),
        (b'{"user": "u1"}', "user", "unknown field"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, field: str, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        decode_recommend(body)
    assert caught.value.kind.status == 422
    assert [(error.field, error.message) for error in caught.value.errors] == [(field, message)]


def test_deep_nesting_is_refused_without_recursion() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    for body, decode in ((b'{"history": %s}' % deep, decode_recommend), (b'{"requests": [%s]}' % deep, decode_batch)):
        with pytest.raises(ProblemError) as caught:
            decode(body)
        assert caught.value.kind.status == 422


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("wrap", [b"%s", b'{"requests": [%s]}'], ids=["alone", "in a batch"])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        # A value that does not fit, then more that is wrong: the decoder stops before it sees that.
        (b'{"history":[],"filter":{"department":1},"filter":5}', "body"),
        (b'{"history":[],"filter":{"department":1,"department":["a"]}}', "body"),
        (b'{"history":[],"filter":{"department":1}', "body"),
        (b'{"history":[],"features":{"age":1}, x', "body"),
        (b'{"history":[],"features":{"age":1},"\xff":2}', "features.age"),
        (b'{"history":[],"filter":{"department":1},"features":{"age":%s}}' % DEEP, "body"),
        (b'{"history":[],"filter":{"department":1,"other":["\\ud800"]}}', "body"),
        # A value that decodes as nothing at all.
        (b'{"history":[],"filter":{"department":[1e400]}}', "filter.department[0]"),
        (b'{"history":[],"filter":{"department":["a",%s]}}' % (b"1" * 4500), "filter.department[1]"),
        (b'{"history":[],"features":{"age":[1e400]}}', "features.age"),
        (b'{"history":[],"features":{"department":[NaN]}}', "body"),
        (b'{"history":[],"features":{"department":["\\ud800"]}}', "body"),
        (b'{"history":[],"filter":{"department":%s}}' % DEEP, "body"),
        (b'{"history":[],"filter":{"department":[%s]}}' % DEEP, "body"),
        (b'{"history":[],"filter":{"a":["x"],"department":{"b":1}},"features":{"age":1}}', "filter.department"),
        (b'{"history":[],"filter":{"department":[%s1]}}' % (b"1," * MOST_FILTER_VALUES), "filter.department"),
    ],
    ids=lambda given: str(given[:50]),
)  # fmt: skip
def test_what_is_wrong_twice_is_refused_too(body: bytes, field: str, wrap: bytes) -> None:
    with pytest.raises(ProblemError) as caught:
        if wrap == b"%s":
            decode_recommend(body)
        else:
            for element in decode_batch(wrap % body).requests:
                decode_recommend(element)
    assert caught.value.kind.status == 422
    fields = [error.field for error in caught.value.errors]
    # What is no JSON at all spoils the batch that it is in, which may read as another kind of mistake.
    assert fields == [field] or (wrap != b"%s" and fields == ["body"])


def test_a_huge_name_costs_no_time() -> None:
    started = time.thread_time()
    with pytest.raises(ProblemError) as caught:
        decode_recommend(b'{"%s": 1}' % (b"`" * 4_000_000))
    assert [(error.field, error.message) for error in caught.value.errors] == [("`" * 100, "unknown field")]
    assert time.thread_time() - started < 1  # about 0.02 s; a regular expression over the name took many seconds


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"history":["a"],"history":["b"]}', "history"),
        (b'{"history":["a"],"histor\\u0079":["b"]}', "history"),
        (b'{"history":[],"num_items":3,"num_items":3}', "num_items"),
        (b'{"history":["a:b","c:d"],"exclude":[],"exclude":["x"]}', "exclude"),
        (b'{"history":[],"exclude_history":false,"exclude_history":false}', "exclude_history"),
        (b'{"history":[],"filter":{"kind":["odd"],"kind":["even"]}}', "kind"),
        (b'{"history":[],"features":{"age":"old","age" : "young"}}', "age"),
        (b'{"history":[],"%s":1,"%s":2}' % ((b"k" * 200,) * 2), None),
    ],
)
def test_a_key_that_is_there_twice_is_refused(body: bytes, name: str | None) -> None:
    with pytest.raises(ProblemError) as caught:
        decode_recommend(body)
    message = f"body: expected each key once, got `{name}` again" if name else f"{'k' * 100}: unknown field"
    assert caught.value.detail == message
    batch = decode_batch(b'{"requests": [%s]}' % body)  # its element fails alone
    with pytest.raises(ProblemError):
        decode_recommend(batch.requests[0])


def test_colons_in_texts_and_defaults_spelled_out_are_no_keys() -> None:
    request = decode_recommend(b'{"history": ["a:b", "\\":"], "user_id": ":", "exclude": [], "num_items": null}')
    assert (request.history, request.user_id) == (["a:b", '":'], ":")
    batch = decode_batch(b'{"requests" : [{"history": ["a:b"]}, ":::"]}')
    assert decode_recommend(batch.requests[0]).history == ["a:b"]


def test_a_batch_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ProblemError) as caught:
        decode_batch(b'{"requests": [{"history": ["a:b"]}], "requests": [{"history": []}]}')
    assert caught.value.detail == "body: expected each key once, got `requests` again"


def test_to_look_for_keys_twice_costs_little() -> None:
    items = ",".join(f'"item-{index:08d}"' for index in range(3000)).encode()
    plain, spelled_out = b'{"history":[%s]}' % items, b'{"history":[%s],"exclude":[]}' % items
    seconds = []
    for body in (plain, spelled_out):
        started = time.thread_time()
        for _ in range(20):
            decode_recommend(body)
        seconds.append((time.thread_time() - started) / 20)
    assert max(seconds) < 0.005  # about 0.1 and 0.2 ms


def test_elements_of_a_batch_stay_undecoded() -> None:
    batch = decode_batch(b'{"requests": [{"history": ["a"]}, {"history": 3}]}')
    assert decode_recommend(batch.requests[0]).history == ["a"]
    with pytest.raises(ProblemError, match="history: expected"):
        decode_recommend(batch.requests[1])


@pytest.mark.parametrize("body", [b'{"requests": []}', b"{}", b'{"requests": {}}', b'{"requests": [1], "x": 1}'])
def test_a_malformed_batch_fails_as_a_whole(body: bytes) -> None:
    with pytest.raises(ProblemError) as caught:
        decode_batch(body)
    assert caught.value.kind.status == 422
