"""Changes under load: other catalogs, and the end of the server."""

from __future__ import annotations

import signal
import time

import httpx
import orjson

from benchmarks.reliability.case import Case, Figure, Setting
from benchmarks.reliability.servers import scripted_requests, scripted_server
from loadtest.open_loop import Load, RunningLoad
from loadtest.summary import summarize
from loka_serve.catalog.catalog import Catalog
from tests.server.processes import RunningServer
from tests.server.scripted_server import make_catalog

RATE = 60.0
SWAPS = 200
NOBODY = "ClientConnectorError"
BAD = b'{"item_id": "a", "semantic_id": [1, 2, 3]}\n{"item_id": "b", "semantic_id": [1, 2]}\n'


def jsonl(catalog: Catalog) -> bytes:
    """A catalog's items as a file."""
    rows = (
        {"item_id": item_id, "semantic_id": list(catalog.semantic_id(index))}
        for index, item_id in enumerate(catalog.item_ids)
    )
    return b"\n".join(orjson.dumps(row) for row in rows)


def is_mixed(answer: dict[str, object], names: dict[str, str]) -> bool:
    """Whether an answer holds an item that its version does not have."""
    items = answer["items"]
    assert isinstance(items, list)
    return any(not item["item_id"].startswith(names[str(answer["catalog_version"])]) for item in items)


def swaps(setting: Setting) -> list[Figure]:
    """Two hundred updates, every third of a file with a bad second line, while requests come."""
    files = {name: jsonl(make_catalog(60, prefix=name)) for name in ("red", "blue")}
    with scripted_server(setting, "--allow-catalog-updates", engine=["--seconds", "0.01"]) as server:
        load = RunningLoad(Load(server.url, RATE, 60.0), scripted_requests())
        accepted = refused = mixed = asked = 0
        names = {make_catalog(60).version: "item-"}
        started = time.monotonic()
        for number in range(SWAPS):
            if number % 3 == 2:
                response = put(server, BAD)
                refused += response.status_code == 422 and "line 2" in response.text
            else:
                name = ("red", "blue")[number % 2]
                response = put(server, files[name])
                accepted += response.status_code == 200
                names[response.json()["version"]] = f"{name}-"
            for _ in range(3):
                asked += 1
                mixed += is_mixed(server.recommend(history=[], num_items=10).json(), names)
        seconds = time.monotonic() - started
        summary = summarize(load.wait())
    bad = SWAPS // 3
    return [
        Figure("swaps", accepted, least=SWAPS - bad, most=SWAPS - bad),
        Figure("bad files refused, with their line", refused, least=bad, most=bad),
        Figure("seconds for all", seconds, "s"),
        Figure("answers looked into", asked),
        Figure("answers that mix versions", mixed, most=0),
        Figure("requests of the load", summary["requests"]),
        Figure("of them failed", summary["requests"] - summary["statuses"].get("200", 0), most=0),
    ]


def put(server: RunningServer, body: bytes) -> httpx.Response:
    return server.client.put("/v1/catalog", content=body, headers={"content-type": "application/x-ndjson"})


def sigterm(setting: Setting) -> list[Figure]:
    """The server is told to end while requests come: what it took it answers, the others are refused."""
    seconds, statuses = [], {"200": 0, "503": 0}
    lost, ends = 0, []
    for _ in range(5):
        with scripted_server(setting, engine=["--seconds", "0.05"]) as server:
            load = RunningLoad(Load(server.url, RATE, 4.0), scripted_requests())
            time.sleep(2.0)
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            ends.append(server.process.wait(20))
            seconds.append(time.monotonic() - started)
            samples = load.wait()
        for status in ("200", "503"):
            statuses[status] += int((samples.rows["status"] == int(status)).sum())
        # Who finds nobody listening any more was refused by the system, not lost by the server.
        lost += sum(count for fault, count in samples.faults.items() if not fault.endswith((NOBODY, "status 503")))
    return [
        Figure("requests while it ran: answered", statuses["200"]),
        Figure("refused with 503", statuses["503"]),
        Figure("lost", lost, most=0),
        Figure("exit status, highest", max(ends), most=0),
        Figure("seconds to the end, longest", max(seconds), "s", most=10.0),
    ]


CASES = (
    Case("catalog_swaps", "200 catalog swaps under load, a third of them bad", swaps, quick=False),
    Case("sigterm", "SIGTERM under load", sigterm, quick=False),
)
