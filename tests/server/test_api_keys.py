"""API keys: the file's form, scopes, rotation while the server runs, and no path that forgets to ask."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.routing import Route

from loka_serve.config import ServerConfig
from loka_serve.errors import ConfigError
from loka_serve.server import api_keys
from loka_serve.server.access import OPEN_PATHS, needs_admin
from loka_serve.server.api_keys import ApiKeys, read_keys
from loka_serve.server.app import create_app
from loka_serve.server.state import ServerState, build_state
from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog, make_model
from tests.server.test_http import problem_of, raw_exchange

SHOP, OPERATOR, NEXT = "shop-key-0123456789", "operator-key-0123456789", "next-shop-key-0123456789"
FILE = (
    f"# who may ask\n\nshop recommend {SHOP}\noperator admin sha256:{hashlib.sha256(OPERATOR.encode()).hexdigest()}\n"
)
ADMIN_ROUTES = {("PUT", "/v1/catalog"), ("POST", "/v1/catalog/rollback"), ("GET", "/v1/debug/batches")}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(FILE)
    return file


@pytest.fixture
def state(key_file: Path, tmp_path: Path) -> ServerState:
    config = ServerConfig(bundle=tmp_path, api_keys_file=key_file, allow_catalog_updates=True)
    return build_state(config, make_model(), make_catalog(), [sys.executable, "-c", ""])


def test_keys_are_kept_as_digests_with_name_and_scope(key_file: Path) -> None:
    keys = read_keys(key_file)
    assert [(key.name, key.scope) for key in keys] == [("shop", "recommend"), ("operator", "admin")]
    assert [key.digest for key in keys] == [hashlib.sha256(key.encode()).digest() for key in (SHOP, OPERATOR)]
    assert SHOP not in repr(keys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no keys: expected NAME SCOPE KEY on each line"),
        (b"# nothing\n", "no keys: expected NAME SCOPE KEY on each line"),
        (b"\nshop secret-key-0123456789\n", "line 2: expected NAME SCOPE KEY, found 2 words"),
        (b"sh/op admin secret-key-0123456789", "line 1: name: expected 1 to 64 letters, digits and ._-"),
        (b"shop root secret-key-0123456789", "line 1: scope: expected one of recommend, admin"),
        (b"shop admin secret", "line 1: key: expected 16 to 512 letters, digits and ._~+/=-"),
        (b"shop admin sha256:secret", "line 1: key: expected 64 hexadecimal digits after sha256:"),
        (b"a admin secret-key-0123456789\nb admin secret-key-0123456789", "a key is there twice: expected each once"),
        (b"\xff", "expected UTF-8 text"),
        (b"#" * (1 << 21), "larger than 1048576 bytes"),
    ],
)
def test_a_bad_file_is_named_with_its_line_and_no_key_is_quoted(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_keys(file)
    assert str(caught.value) == f"{file}: {message}"
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path)


def test_every_key_is_compared_in_constant_time(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hmac.compare_digest, against all keys, whichever fits and if none does."""
    keys = ApiKeys(key_file)
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return first == second

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    found = [keys.find(presented) for presented in (SHOP, OPERATOR, "x", "\udc80")]
    assert [key.name if key else None for key in found] == ["shop", "operator", None, None]
    assert compared == [(32, 32)] * 8


def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "LOOK_SECONDS", 0.0)
    keys = ApiKeys(key_file)
    key_file.write_text(f"{FILE}shop-next recommend {NEXT}\n")  # both work while clients change over
    assert keys.find(SHOP) and keys.find(NEXT)
    new = key_file.with_name("new")
    new.write_text(f"shop recommend {NEXT}\n")
    new.rename(key_file)
    assert keys.find(SHOP) is None and keys.find(NEXT)
    key_file.write_text("nonsense\n")
    assert keys.find(NEXT)
    assert "the API keys stay as they were" in caplog.text
    key_file.unlink()
    assert keys.find(NEXT)


def test_the_file_is_looked_at_once_a_second_at_most(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys(key_file)
    looks = []
    monkeypatch.setattr(keys, "_signature", lambda: looks.append(1))
    for _ in range(100):
        keys.find(SHOP)
    assert len(looks) <= 1


def test_each_route_is_open_or_asks_for_a_key_of_its_scope(state: ServerState) -> None:
    client = TestClient(create_app(state), raise_server_exceptions=False)
    routes = [route for route in client.app.routes if isinstance(route, APIRoute | Route)]  # type: ignore[attr-defined]
    seen = {(method, route.path) for route in routes for method in route.methods or () if method != "HEAD"}
    assert seen > ADMIN_ROUTES
    for method, path in seen:
        url = path.replace("{name}", "scripted")
        if path in OPEN_PATHS:
            assert client.request(method, url).status_code in (200, 503)
            continue
        problem = problem_of(client.request(method, url), 401)
        assert "traceback" not in str(problem).lower()
        problem_of(client.request(method, url, headers={"x-api-key": "nobody-s-key-0123456"}), 401)
        as_shop = client.request(method, url, headers={"authorization": f"Bearer {SHOP}"})
        assert (as_shop.status_code == 403) == ((method, path) in ADMIN_ROUTES), (method, path)
        as_operator = client.request(method, url, headers={"authorization": f"bearer {OPERATOR}"})
        assert as_operator.status_code not in (401, 403), (method, path)
    samples = {name: state.metrics.registry.get_sample_value("loka_refused_keys_total", {"reason": name})
               for name in ("missing", "unknown", "scope")}  # fmt: skip
    asked = len([path for _, path in seen if path not in OPEN_PATHS])
    assert samples == {"missing": asked, "unknown": asked, "scope": len(ADMIN_ROUTES)}
    assert needs_admin("DELETE", "/v1/catalog/anything") and not needs_admin("GET", "/v1/catalog")


def test_without_keys_a_page_of_another_origin_cannot_change_the_catalog(scripted: RunningServer) -> None:
    """A browser on the machine of a server on loopback would send it without asking."""

    def status(origin: str) -> int:
        return scripted.client.post("/v1/catalog/rollback", headers={"origin": origin}).status_code

    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", ""):
        assert status(origin) == 403
    assert status(scripted.url) == 409  # there is nothing to roll back to
    assert scripted.client.post("/v1/catalog/rollback").status_code == 409
    asked = scripted.client.post("/v1/recommend", json={"history": []}, headers={"origin": "http://evil.example"})
    assert asked.status_code == 200


def test_the_document_says_where_a_key_is_needed(state: ServerState) -> None:
    page = create_app(state).openapi()
    assert set(page["components"]["securitySchemes"]) == {"bearer", "header"}
    assert "security" not in page["paths"]["/health/live"]["get"]
    post = page["paths"]["/v1/recommend"]["post"]
    assert post["security"] == [{"bearer": []}, {"header": []}]
    assert {"401", "403"} <= set(post["responses"])


@pytest.fixture(scope="module")
def guarded(catalog_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(FILE)
    with running(scripted_command(catalog_file, "--api-keys-file", str(file), "--max-body-bytes", "20000")) as server:
        server.key_file = file  # type: ignore[attr-defined]
        yield server


def test_without_a_key_no_byte_of_the_body_is_waited_for(guarded: RunningServer) -> None:
    head = b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    started = time.monotonic()
    answer = raw_exchange(guarded, head)
    assert answer.startswith(b"HTTP/1.1 401 ") and b"www-authenticate: Bearer" in answer
    assert time.monotonic() - started < 5
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 1_000_000_000:
            sent += 1 << 16
            yield bytes(1 << 16)

    # The rest is thrown away up to a bound, then the connection is closed.
    with pytest.raises(httpx.HTTPError):
        response = guarded.client.post("/v1/recommend", content=endless())
        assert response.status_code == 401
        raise httpx.WriteError("closed after the answer")
    assert sent < 100_000_000


def test_keys_are_rotated_without_a_restart(guarded: RunningServer) -> None:
    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return guarded.client.post("/v1/recommend", json={"history": []}, headers=headers).status_code

    assert (status(SHOP), status(NEXT)) == (200, 401)
    file: Path = guarded.key_file  # type: ignore[attr-defined]
    file.write_text(FILE.replace(SHOP, NEXT))
    deadline = time.monotonic() + 15
    while status(SHOP) != 401:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert status(NEXT) == 200
    assert not re.search("|".join((SHOP, NEXT, OPERATOR)), guarded.log)


def test_the_last_batches_are_shown_to_admins(guarded: RunningServer) -> None:
    operator = {"x-api-key": OPERATOR}
    guarded.client.post("/v1/recommend", json={"history": [], "num_items": 3, "beam_width": 7}, headers=operator)
    batches = guarded.client.get("/v1/debug/batches", headers=operator).json()["batches"]
    newest = batches[0]
    assert (newest["size"], newest["beam_widths"], newest["failed"], newest["lost"]) == (1, [7], 0, None)
    assert {"prepare", "decode", "total", "expand"} <= set(newest["stages_ms"])
    assert newest["round_trip_ms"] >= newest["stages_ms"]["total"] >= 0
    assert len(newest["queue_ms"]) == 1 and 0 <= newest["seconds_ago"] < 30
    batch_ids = [batch["batch_id"] for batch in batches]
    assert batch_ids == sorted(batch_ids, reverse=True)


def test_without_keys_debug_routes_stay_closed_unless_told(scripted: RunningServer) -> None:
    problem = problem_of(scripted.client.get("/v1/debug/batches"), 403)
    assert problem["detail"] == "debug routes are closed; start the server with --api-keys-file or --allow-debug"
