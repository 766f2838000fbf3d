"""Both clients against a running server: typed answers, typed errors, uploads."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loka_serve.client import (
    AsyncClient,
    CatalogInfo,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Model,
    NoAnswer,
    NotAllowed,
    RequestFailed,
    RequestFields,
    Retries,
)
from loka_serve.server.schemas import RecommendRequest
from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_engine import NAN, SLOW, command
from tests.server.scripted_server import make_catalog

KEY = "operator-key-0123456789"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("client")
    keys, catalog_file = folder / "keys", folder / "catalog.safetensors"
    make_catalog().save(catalog_file)
    keys.write_text(f"operator admin {KEY}\n")
    flags = ("--api-keys-file", str(keys), "--allow-catalog-updates", "--max-batch-requests", "20")
    with running(scripted_command(catalog_file, *flags)) as server:
        yield server


Ask = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: RunningServer) -> Ask:
    """Runs `call(client)` with one of the two clients, and gives what it gave or raises what it raised."""

    def ask(call: Callable[[Any], Any], **arguments: Any) -> Any:
        arguments = {"api_key": KEY} | arguments
        if request.param == "sync":
            with Client(server.url, **arguments) as client:
                return call(client)

        async def run() -> Any:
            async with AsyncClient(server.url, **arguments) as client:
                return await call(client)

        return asyncio.run(run())

    return ask


def test_a_recommendation_is_typed(ask: Ask) -> None:
    answer = ask(
        lambda client: client.recommend(
            history=("item-9", "unknown"),
            num_items=4,
            beam_width=8,
            fields=["kind", "price"],
            filter={"kind": ["even"]},
        )
    )
    assert [(item.rank, item.score) for item in answer.items] == [(1, -0.25), (2, -0.75), (3, -1.25), (4, -1.5)]
    assert answer.items[0].attributes == {"kind": "even", "price": None}
    assert len(answer.items[0].semantic_id) == 3
    assert (answer.usage.history_length, answer.usage.unknown_items, answer.complete) == (1, 1, True)
    assert answer.request_id and answer.model == "scripted"


def test_numpy_arrays_are_sent_as_lists(ask: Ask) -> None:
    answer = ask(lambda client: client.recommend(history_sids=np.array([[1, 2, 3]]), num_items=np.int64(2)))
    assert len(answer.items) == 2


def test_elements_of_a_batch_fail_alone(ask: Ask) -> None:
    requests: list[RequestFields] = [{"history": ["item-1"], "num_items": 3}, {"history_sids": command(NAN)}, {}]
    good, failed, invalid = ask(lambda client: client.recommend_batch(requests))
    assert len(good.items) == 3
    assert isinstance(failed, RequestFailed) and failed.status == 500
    assert failed.detail == "the model's scores for this request are not numbers"
    assert isinstance(invalid, InvalidRequest) and invalid.errors[0].field == "history"
    assert invalid.request_id.endswith("-2")


def test_errors_are_typed(ask: Ask) -> None:
    with pytest.raises(InvalidRequest, match="num_items: expected 1 to 64, got 1000") as caught:
        ask(lambda client: client.recommend(history=[], num_items=1000))
    assert (caught.value.status, caught.value.errors[0].field) == (422, "num_items")
    assert caught.value.type == "urn:loka-serve:problem:invalid" and caught.value.request_id
    with pytest.raises(DeadlineExceeded, match="the deadline passed"):
        ask(lambda client: client.recommend(history_sids=command(SLOW), timeout_ms=20))
    for key in (None, "nobody-s-key-0123456"):
        with pytest.raises(NotAllowed) as refused:
            ask(lambda client: client.recommend(history=[]), api_key=key)
        assert refused.value.status == 401
    with pytest.raises(NoAnswer):
        ask(lambda client: client.recommend(history_sids=command(SLOW)), timeout=0.05)


def test_models_and_health(ask: Ask) -> None:
    (model,) = ask(lambda client: client.models())
    assert isinstance(model, Model)
    assert (model.name, model.engine, model.limits.max_beam_width) == ("scripted", "scripted", 64)
    assert [feature.name for feature in model.features] == ["age", "region"]
    assert ask(lambda client: client.is_ready()) is True
    ask(lambda client: client.wait_until_ready(5))


def test_a_catalog_is_uploaded_and_rolled_back(ask: Ask, tmp_path: Path) -> None:
    before = ask(lambda client: client.catalog())
    file = tmp_path / "items.jsonl"
    file.write_text("\n".join(json.dumps({"item_id": f"new-{n}", "semantic_id": [n, 0, 0]}) for n in range(7)))
    after = ask(lambda client: client.replace_catalog(file))
    assert isinstance(after, CatalogInfo)
    assert (after.items, after.previous_version) == (7, before.version)
    assert ask(lambda client: client.roll_back_catalog()).version == before.version
    file.write_text('{"item_id": 3}')
    with pytest.raises(InvalidRequest, match="line 1"):
        ask(lambda client: client.replace_catalog(str(file)))
    with pytest.raises(FileNotFoundError):
        ask(lambda client: client.replace_catalog(tmp_path / "none"))


def test_nobody_there() -> None:
    with Client("http://127.0.0.1:9", retries=Retries(attempts=1)) as client:
        assert client.is_ready() is False
        with pytest.raises(NoAnswer, match="POST /v1/recommend: ConnectError"):
            client.recommend(history=[])
        with pytest.raises(NoAnswer):
            client.wait_until_ready(0.2)


def test_the_client_knows_every_field_that_the_server_does() -> None:
    assert RequestFields.__annotations__.keys() == {field.name for field in msgspec.structs.fields(RecommendRequest)}


def test_both_clients_can_do_the_same() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        return {name: list(inspect.signature(value).parameters) for name, value in public.items()}

    assert methods(Client) == methods(AsyncClient)


def test_the_client_loads_neither_torch_nor_the_server() -> None:
    unwanted = "{'torch', 'numpy', 'fastapi', 'loka_serve.server'}"
    code = f"import sys, loka_serve.client; sys.exit(bool({unwanted} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
