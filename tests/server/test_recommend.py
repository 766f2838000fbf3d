"""What nobody foresaw: it is counted as such, fails one element of a batch only, and leaves nothing running."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from loka_serve.config import ServerConfig
from loka_serve.server import recommend
from loka_serve.server.app import create_app
from loka_serve.server.middleware import RequestContext
from loka_serve.server.queue import Ticket
from loka_serve.server.recommend import RecommendRoutes
from loka_serve.server.resolution import resolve
from loka_serve.server.state import ServerState, build_state
from tests.server.scripted_server import make_catalog, make_model


@pytest.fixture
def state(tmp_path: Path) -> ServerState:
    """A server that thinks that its engine is up; what is sent to it is never answered."""
    config = ServerConfig(bundle=tmp_path, max_batch_requests=20, default_timeout_ms=200)
    state = build_state(config, make_model(), make_catalog(), [sys.executable, "-c", ""])
    state.batcher.send = lambda batch: None
    state.batcher._up = True
    return state


def client_of(state: ServerState) -> TestClient:
    """Without the lifespan, so without an engine process."""
    return TestClient(create_app(state), raise_server_exceptions=False)


def outcomes(state: ServerState, route: str) -> dict[str, float]:
    """Counts that are not 0."""
    samples = [sample for family in state.metrics.requests.collect() for sample in family.samples]
    return {
        sample.labels["outcome"]: sample.value
        for sample in samples
        if sample.name.endswith("_total") and sample.labels["route"] == route and sample.value
    }


def break_resolve(monkeypatch: pytest.MonkeyPatch, user_id: str, error: BaseException) -> None:
    def broken(request: Any, *rest: Any) -> Any:
        if request.user_id == user_id:
            raise error
        return resolve(request, *rest)

    monkeypatch.setattr(recommend, "resolve", broken)


def test_an_unexpected_exception_is_counted_as_internal(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    break_resolve(monkeypatch, "bad", RuntimeError("told to"))
    response = client_of(state).post("/v1/recommend", json={"history": [], "user_id": "bad"})
    assert response.status_code == 500
    assert response.json()["type"] == "urn:loka-serve:problem:internal"
    assert outcomes(state, "/v1/recommend") == {"internal": 1}
    assert state.window.outcomes == {"internal": 1}


def test_an_unexpected_exception_fails_one_element_of_a_batch(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_resolve(monkeypatch, "bad", RuntimeError("told to"))
    requests = [{"history": []}, {"history": [], "user_id": "bad"}, {"history": [], "filter": {"kind": [1e300]}}]
    response = client_of(state).post("/v1/recommend/batch", json={"requests": requests})
    assert response.status_code == 200
    # The other two wait for the engine until their deadline.
    assert [answer["status"] for answer in response.json()["responses"]] == [504, 500, 504]
    assert outcomes(state, "/v1/recommend/batch") == {"deadline": 2, "internal": 1}


def test_bad_values_in_a_mapping_fail_one_element_of_a_batch(state: ServerState) -> None:
    body = (
        b'{"requests": [{"history": []}, {"history": [], "filter": {"kind": [1e400]}}, {"history": [], "filter": 5}]}'
    )
    answers = client_of(state).post("/v1/recommend/batch", content=body).json()["responses"]
    assert [answer["status"] for answer in answers] == [504, 422, 422]
    assert [error["field"] for answer in answers[1:] for error in answer["errors"]] == ["filter.kind[0]", "filter"]


def test_what_ends_a_batch_early_drops_what_is_submitted(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = dataclasses.replace(state.config, default_timeout_ms=60_000)
    state.config = patient
    break_resolve(monkeypatch, "bad", asyncio.CancelledError())

    async def read(self: RecommendRoutes, request: Any) -> bytes:
        return b'{"requests": [{"history": []}, {"history": []}, {"history": [], "user_id": "bad"}]}'

    monkeypatch.setattr(RecommendRoutes, "_read", read)
    monkeypatch.setattr(
        recommend, "context_of", lambda request: RequestContext("id", asyncio.get_running_loop().time())
    )
    submitted = []
    submit = state.batcher.submit

    def recorded(*given: Any, **named: Any) -> Ticket:
        submitted.append(submit(*given, **named))
        return submitted[-1]

    monkeypatch.setattr(state.batcher, "submit", recorded)

    async def run() -> None:
        routes = RecommendRoutes(state)
        with pytest.raises(asyncio.CancelledError):
            await routes.recommend_batch(None)  # type: ignore[arg-type]
        assert len(submitted) == 2
        assert all(ticket.future.done() for ticket in submitted)
        assert state.batcher.queue_depth == 0

    asyncio.run(run())
