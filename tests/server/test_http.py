"""The HTTP interface over a real socket, with the scripted engine behind it: bodies, answers, errors, documents."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.processes import RunningServer
from tests.server.scripted_engine import DOUBLE_LEAF, INVALID_LEAF, NAN, RAISE, command
from tests.server.scripted_server import make_catalog

CATALOG = make_catalog()


def problem_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The body of a problem answer, checked for what all of them have in common."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert problem["instance"].endswith(problem["request_id"])
    assert problem["type"].startswith("urn:loka-serve:problem:")
    assert problem["title"] and problem["detail"]
    assert not re.search(r"Traceback|\.py|/tmp|/home|/usr", response.text)
    return problem


def raw_exchange(server: RunningServer, *parts: bytes) -> bytes:
    """Send bytes as they are, give what came back until the server closes or falls silent for a second."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=1.0) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        try:
            while data := connection.recv(65536):
                received += data
        except TimeoutError:
            pass
    return received


def test_answer(scripted: RunningServer) -> None:
    response = scripted.recommend(
        user_id="u1", history=["item-9", "unknown"], num_items=4, beam_width=8, fields=["kind"]
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    # The scripted engine ranks leaves in order, and the first items are on a leaf each.
    assert [item["item_id"] for item in body["items"]] == [f"item-{leaf}" for leaf in range(4)]
    expected = [scripted.expected_score(CATALOG.semantic_id(leaf), leaf, 1) for leaf in range(4)]
    assert [(item["rank"], item["score"]) for item in body["items"]] == list(zip(range(1, 5), expected, strict=True))
    for item in body["items"]:
        index = CATALOG.index_of(item["item_id"])
        assert index is not None
        assert item["semantic_id"] == list(CATALOG.semantic_id(index))
        assert item["kind"] == ("even" if int(item["item_id"].removeprefix("item-")) % 2 == 0 else "odd")
        assert set(item) == {"item_id", "score", "semantic_id", "rank", "kind"}
    assert body["complete"] is True
    assert body["model"] == "scripted"
    assert body["catalog_version"] == CATALOG.version
    assert body["request_id"] == response.headers["x-request-id"]
    usage = body["usage"]
    assert (usage["history_length"], usage["unknown_items"], usage["beam_width"]) == (1, 1, 8)
    assert usage["batch_size"] == 1
    assert 0 <= usage["queue_ms"] <= usage["total_ms"]
    assert 0 <= usage["engine_ms"] <= usage["total_ms"]


def test_items_of_one_semantic_id_come_by_popularity_and_count_one_by_one(scripted: RunningServer) -> None:
    items = scripted.recommend(history=[], num_items=6, beam_width=6).json()["items"]
    assert [item["item_id"] for item in items] == [f"item-{index}" for index in range(6)]
    assert items[4]["semantic_id"] == items[5]["semantic_id"]
    assert items[4]["score"] == items[5]["score"]


def test_attributes_that_an_item_lacks_are_null_and_lists_stay_lists(scripted: RunningServer) -> None:
    items = scripted.recommend(history=[], num_items=2, fields=["price", "tags"]).json()["items"]
    assert [(item["price"], item["tags"]) for item in items] == [(None, ["all", "tag-0"]), (0.5, ["all", "tag-1"])]


def test_filters_and_exclusions(scripted: RunningServer) -> None:
    response = scripted.recommend(
        history=["item-1"], exclude_history=True, exclude=["item-5"], filter={"kind": ["odd"]}, num_items=3
    )
    assert [item["item_id"] for item in response.json()["items"]] == ["item-3", "item-7", "item-9"]
    numeric = scripted.recommend(history=[], filter={"price": [0.5, 3, 99]}, num_items=3).json()
    assert [item["item_id"] for item in numeric["items"]] == ["item-1", "item-6"]


def test_fewer_items_than_asked_for_are_said_to_be_incomplete(scripted: RunningServer) -> None:
    before = scripted.metric("loka_short_answers_total")
    body = scripted.recommend(history=[], filter={"price": [0.5]}, num_items=3).json()
    assert ([item["item_id"] for item in body["items"]], body["complete"]) == (["item-1"], False)
    nothing = scripted.recommend(history=[], filter={"kind": ["neither"]}).json()
    assert (nothing["items"], nothing["complete"]) == ([], False)
    assert scripted.metric("loka_short_answers_total") == before + 2


def test_validation_names_the_field(scripted: RunningServer) -> None:
    problem = problem_of(scripted.recommend(history=["a", 3]), 422)
    assert problem["errors"] == [{"field": "history[1]", "message": "expected `str`, got `int`"}]
    problem = problem_of(scripted.recommend(history=[], filter={"colour": ["red"]}), 422)
    assert problem["errors"][0]["field"] == "filter.colour"


def test_a_malformed_element_of_a_batch_fails_alone(scripted: RunningServer) -> None:
    requests = [{"history": [], "num_items": 1}, {"history": 3}, {"history": ["item-1"], "num_items": 2}, 7]
    response = scripted.client.post("/v1/recommend/batch", json={"requests": requests})
    assert response.status_code == 200
    body = response.json()
    answers = body["responses"]
    assert [answer.get("status", 200) for answer in answers] == [200, 422, 200, 422]
    assert [len(answers[row]["items"]) for row in (0, 2)] == [1, 2]
    assert answers[2]["items"][0]["score"] == scripted.expected_score(CATALOG.semantic_id(0), 0, 1)
    assert [answers[row]["errors"][0]["field"] for row in (1, 3)] == ["history", "body"]
    assert [answer["request_id"] for answer in answers] == [f"{body['request_id']}-{row}" for row in range(4)]
    assert answers[0]["usage"]["batch_size"] == 2


def test_a_batch_of_too_many_fails_as_a_whole(scripted: RunningServer) -> None:
    response = scripted.client.post("/v1/recommend/batch", json={"requests": [{"history": []}] * 21})
    assert problem_of(response, 422)["errors"] == [
        {"field": "requests", "message": "expected 1 to 20 requests, got 21"}
    ]


@pytest.mark.parametrize(
    ("code", "reason", "detail"),
    [
        (NAN, "nan", "the model's scores for this request are not numbers"),
        (INVALID_LEAF, "invalid", "the engine's answer to this request was not valid"),
        (DOUBLE_LEAF, "invalid", "the engine's answer to this request was not valid"),
        (RAISE, "exception", "the engine could not compute this request"),
    ],
)
def test_one_bad_request_among_16_fails_alone(scripted: RunningServer, code: int, reason: str, detail: str) -> None:
    before = scripted.metric(f'loka_invalid_answers_total{{reason="{reason}"}}')
    requests: list[dict[str, Any]] = [{"history_sids": [[index, 0, 0]], "num_items": 2} for index in range(16)]
    requests[5] = {"history_sids": command(code), "num_items": 2}
    answers = scripted.client.post("/v1/recommend/batch", json={"requests": requests}).json()["responses"]
    assert [answer.get("status", 200) for answer in answers] == [200] * 5 + [500] + [200] * 10
    good = [answer for answer in answers if "items" in answer]
    expected = [scripted.expected_score(CATALOG.semantic_id(leaf), leaf, 1) for leaf in (0, 1)]
    assert all([item["score"] for item in answer["items"]] == expected for answer in good)
    assert {answer["usage"]["batch_size"] for answer in good} == {16}
    assert answers[5]["detail"] == detail
    assert scripted.metric(f'loka_invalid_answers_total{{reason="{reason}"}}') == before + 1


def test_a_body_that_is_too_large_is_refused_while_it_streams(scripted: RunningServer) -> None:
    sent = 0

    def endless() -> Any:
        nonlocal sent
        while sent < 100_000_000:
            sent += 10_000
            yield b" " * 10_000

    with contextlib.suppress(httpx.HTTPError):  # the server stops reading long before the end and closes
        problem_of(scripted.client.post("/v1/recommend", content=endless()), 413)
    assert sent < 50_000_000
    # A body that ends soon after the limit is read to its end, and the answer arrives.
    problem_of(scripted.client.post("/v1/recommend", content=iter([b" " * 10_000] * 3)), 413)
    problem_of(scripted.client.post("/v1/recommend", content=b" " * 30_000), 413)
    assert scripted.recommend(history=[]).status_code == 200


def test_a_declared_body_that_is_too_large_is_refused_before_it_is_sent(scripted: RunningServer) -> None:
    head = b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\nExpect: 100-continue\r\n\r\n"
    assert raw_exchange(scripted, head).startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_is_refused(scripted: RunningServer) -> None:
    response = scripted.client.post("/v1/recommend", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    problem_of(response, 415)


def test_request_ids_are_taken_over_only_if_harmless(scripted: RunningServer) -> None:
    def answered_id(sent: str) -> str:
        return scripted.client.get("/health/live", headers={"x-request-id": sent}).headers["x-request-id"]

    assert answered_id("abc-123.X_y:z") == "abc-123.X_y:z"
    for harmful in ("a b", "a\tb", "<script>", "x" * 129, ""):
        assert re.fullmatch(r"[0-9a-f]{32}", answered_id(harmful))


def test_unknown_paths_and_methods_are_problems(scripted: RunningServer) -> None:
    problem_of(scripted.client.get("/v1/nothing"), 404)
    response = scripted.client.delete("/v1/models")
    problem_of(response, 405)
    assert response.headers["allow"] == "GET"
    assert scripted.client.post("/v1/catalog").headers["allow"] == "GET, PUT"


def test_model_catalog_and_health(scripted: RunningServer) -> None:
    (model,) = scripted.client.get("/v1/models").json()["models"]
    assert model == {
        "name": "scripted",
        "engine": "scripted",
        "device": "cpu",
        "levels": 3,
        "codebook_sizes": [256, 16, 16],
        "beam_width": 16,
        "features": [{"name": "age", "values": ["young", "old"]}, {"name": "region", "values": ["north", "south"]}],
        "limits": {"max_batch": 16, "max_beam_width": 64, "max_context": 50},
    }
    catalog = scripted.client.get("/v1/catalog").json()
    assert (catalog["version"], catalog["items"], catalog["semantic_ids"]) == (CATALOG.version, 60, 49)
    assert {row["name"]: row["distinct_values"] for row in catalog["attributes"]} == {"kind": 2, "price": 54, "tags": 4}
    assert scripted.client.get("/health/live").json() == {"status": "live"}
    assert scripted.client.get("/health/ready").json() == {"status": "ready"}


def test_metrics_have_the_series_and_no_word_of_a_client(scripted: RunningServer) -> None:
    scripted.recommend(user_id="secret-user", history=["item-1", "secret-item"])
    scripted.client.get("/secret-path")
    text = scripted.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {
        *("loka_requests", "loka_http_responses", "loka_request_seconds", "loka_queue_seconds", "loka_batch_size"),
        *("loka_padding_ratio", "loka_engine_seconds", "loka_beam_width", "loka_items", "loka_unknown_items"),
        *("loka_short_answers", "loka_invalid_answers", "loka_queue_depth", "loka_requests_in_flight"),
        *(
            "loka_batches_in_flight",
            "loka_engine_up",
            "loka_engine_restarts",
            "loka_catalog_info",
            "loka_catalog_items",
        ),
        *("loka_catalog_swaps", "loka_build_info", "process_resident_memory_bytes"),
    } <= set(families)
    routes = {sample.labels["route"] for sample in families["loka_http_responses"].samples}
    assert {"/v1/recommend", "unmatched"} <= routes
    assert "secret" not in text
    assert scripted.metric("loka_engine_up") == 1
    assert scripted.metric(f'loka_catalog_info{{version="{CATALOG.version}"}}') == 1
    stages = {sample.labels.get("stage") for sample in families["loka_engine_seconds"].samples}
    assert {"prepare", "decode", "total", "expand"} <= stages


def test_requests_are_counted_by_outcome(scripted: RunningServer) -> None:
    def count(outcome: str, route: str = "/v1/recommend") -> float:
        return scripted.metric(f'loka_requests_total{{outcome="{outcome}",route="{route}"}}')

    before = {outcome: count(outcome) for outcome in ("ok", "invalid", "failed")}
    scripted.recommend(history=[])
    scripted.recommend(history=7)
    scripted.recommend(history_sids=command(NAN))
    assert {outcome: count(outcome) - before[outcome] for outcome in before} == {"ok": 1, "invalid": 1, "failed": 1}


def test_scanner_paths_add_no_series(scripted: RunningServer) -> None:
    scripted.client.get("/x")
    before = len(scripted.client.get("/metrics").text.splitlines())
    for index in range(200):
        scripted.client.get(f"/scan/{index}.php")
    assert len(scripted.client.get("/metrics").text.splitlines()) == before


def test_documents(scripted: RunningServer) -> None:
    assert "swagger" in scripted.client.get("/docs").text
    page = scripted.client.get("/openapi.json").json()
    assert page["openapi"].startswith("3.1")
    post = page["paths"]["/v1/recommend"]["post"]
    assert set(post["responses"]) == {"200", "408", "413", "415", "422", "429", "500", "503", "504"}
    fields = page["components"]["schemas"]["RecommendRequest"]["properties"]
    assert {"history", "history_sids", "filter", "timeout_ms"} <= set(fields)
    assert fields["num_items"]["anyOf"][0]["maximum"] == 64
    # Every reference leads somewhere.
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(page)))
    assert names <= set(page["components"]["schemas"])


def test_the_engine_says_where_its_dispatch_table_is_from(scripted: RunningServer) -> None:
    assert scripted.metric('loka_dispatch_info{reason_class="other_environment",source="measured"}') == 1
