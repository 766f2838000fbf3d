"""The whole product in one run: build a bundle from the trained checkpoint, serve it, and recommend groceries by name.

python -m examples.groceries.demo [--work-dir DIR] [--keep] [--port PORT]

Exits non-zero if any step fails. With --keep the server stays up until interrupted.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from examples.groceries.open_basket import OPEN_BASKET, open_basket_features
from loka_serve.command_line import CommandParser, run_command_line

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
HISTORY_SHOWN = 8
ITEMS_SHOWN = 8
BASKET_ITEMS_SHOWN = 3
LATENCY_REQUESTS = 200
CLIENTS = 4


class DemoError(Exception):
    """A step of the demo that did not do what it promises."""


class Client:
    """A keep-alive JSON client of one server."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        payload = None if body is None else json.dumps(body)
        self.connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        return response.status, json.loads(response.read() or b"null")

    def recommend(self, body: Mapping[str, Any]) -> dict[str, Any]:
        status, answer = self.call("POST", "/v1/recommend", body)
        if status != 200:
            raise DemoError(f"POST /v1/recommend answered {status}: {answer}")
        if len(answer["items"]) != body["num_items"]:
            raise DemoError(f"asked for {body['num_items']} items, got {len(answer['items'])}")
        return answer


def run(*command: str) -> None:
    """Run a step, showing the command as a user would type it."""
    print(f"\n$ {' '.join(command)}", flush=True)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, *command[1:]], check=False).returncode
    if code:
        raise DemoError(f"the command above exited with code {code}")
    print(f"  ({time.perf_counter() - started:.0f} s)", flush=True)


def start_server(bundle: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start the server and wait until it is ready; its log goes to a file."""
    command = ["-m", "loka_serve.serve", "--bundle", str(bundle), "--port", str(port)]
    print(f"\n$ python {' '.join(command)}   # log: {log}", flush=True)
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    # In a session of its own: Ctrl-C is the demo's to pass on, once.
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError(f"the server exited with code {server.returncode}:\n{log.read_text()[-2000:]}")
        try:
            if Client(port).call("GET", "/health/ready")[0] == 200:
                return server
        except OSError:
            pass
        time.sleep(0.2)
    server.kill()
    raise DemoError(f"the server was not ready after 90 s:\n{log.read_text()[-2000:]}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def show(title: str, answer: dict[str, Any]) -> None:
    print(f"\n{title}")
    for item in answer["items"]:
        semantic_id = "-".join(map(str, item["semantic_id"]))
        print(f"  {item['score']:8.3f}  {item['name']:<58} {item['department']:<18} {semantic_id}")
    usage = answer["usage"]
    print(f"  [{usage['total_ms']:.1f} ms, of which engine {usage['engine_ms']:.1f} ms; beam {usage['beam_width']}]")


def shown_household(households: list[dict[str, Any]]) -> dict[str, Any]:
    """The first household whose history asks for the next basket, and that bought a few items in it."""
    for household in households:
        if OPEN_BASKET.name not in household["features"] and len(household["target"]) > BASKET_ITEMS_SHOWN:
            return household
    raise DemoError("no history asks for the next basket")


def recommend_to_household(client: Client, household: dict[str, Any], names: dict[str, str]) -> None:
    """The four questions of the demo: plain, with a department filter, with exclusions, inside an open basket."""
    history = household["history"]
    print(f"\nHousehold {household['user_id']}, {len(history)} purchases; the last {HISTORY_SHOWN}:")
    for item in history[-HISTORY_SHOWN:]:
        print(f"            {names[item]}")
    body = {
        "user_id": household["user_id"],
        "history": history,
        "features": household.get("features", {}),
        "num_items": ITEMS_SHOWN,
        "beam_width": 64,
        "fields": ["name", "department"],
    }
    plain = client.recommend(body)
    show("Recommended next:", plain)
    produce = client.recommend({**body, "filter": {"department": ["PRODUCE"]}})
    show('The same with "filter": {"department": ["PRODUCE"]}:', produce)
    if {item["department"] for item in produce["items"]} != {"PRODUCE"}:
        raise DemoError("a filtered answer holds an item of another department")
    first = [item["item_id"] for item in plain["items"][:3]]
    excluded = client.recommend({**body, "exclude": first})
    show('The same with "exclude" of the first three recommendations:', excluded)
    if {item["item_id"] for item in excluded["items"]} & set(first):
        raise DemoError("an excluded item was recommended")
    basket = household["target"][:BASKET_ITEMS_SHOWN]
    inside = open_basket_features("any_order", len(basket))
    answer = client.recommend(
        {**body, "history": history + basket, "features": {**body["features"], **inside}, "exclude": basket}
    )
    print(f'\nIt has begun its next basket, "features": {json.dumps(inside)}, "exclude" of these:')
    for item in basket:
        print(f"            {names[item]}")
    show("Recommended to go with them:", answer)
    if {item["item_id"] for item in answer["items"]} & set(basket):
        raise DemoError("what is in the basket was recommended")


def measure_latency(port: int, households: list[dict[str, Any]]) -> None:
    """Latency of 200 requests of different households from 4 clients at once."""

    def one_client(start: int) -> list[float]:
        client, milliseconds = Client(port), []
        for household in households[start:LATENCY_REQUESTS:CLIENTS]:
            begun = time.perf_counter()
            client.recommend(
                {
                    "history": household["history"],
                    "features": household["features"],
                    "num_items": 10,
                    "beam_width": 32,
                }
            )
            milliseconds.append(1e3 * (time.perf_counter() - begun))
        return milliseconds

    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        latencies = np.array(sum(pool.map(one_client, range(CLIENTS)), []))
    rate = len(latencies) / (time.perf_counter() - begun)
    p50, p99 = np.percentile(latencies, [50, 99])
    print(
        f"\n{len(latencies)} requests from {CLIENTS} clients on the CPU: "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {rate:.1f} req/s"
    )
    if len(latencies) != LATENCY_REQUESTS:
        raise DemoError(f"expected {LATENCY_REQUESTS} answers, got {len(latencies)}")


def demo(work_dir: Path, port: int, keep: bool) -> None:
    data, bundle = work_dir / "data", work_dir / "bundle"
    work_dir.mkdir(parents=True, exist_ok=True)
    run("python", "-m", "examples.groceries.prepare", "--out", str(data))
    run(
        *(
            "python",
            "-m",
            "loka_serve.build",
            "--checkpoint",
            str(CHECKPOINT),
            "--catalog",
            str(data / "catalog.jsonl"),
        ),
        *(
            "--calibration",
            str(data / "histories.jsonl"),
            "--out",
            str(bundle),
            "--min-top-k-overlap",
            "0.9",
        ),
    )
    server = start_server(bundle, port, work_dir / "server.log")
    try:
        names = {row["item_id"]: row["name"] for row in read_lines(data / "catalog.jsonl")}
        households = read_lines(data / "histories.jsonl")
        recommend_to_household(Client(port), shown_household(households), names)
        measure_latency(port, households)
        if keep:
            print(f"\nServing on http://127.0.0.1:{port} (docs at /docs); Ctrl-C stops it.", flush=True)
            server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        if server.poll() is None:
            server.terminate()
    if server.wait(timeout=30):
        raise DemoError(f"the server stopped with code {server.returncode}")


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--work-dir", type=Path, default=Path(".demo"), help="data, bundle and log go here")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--keep", action="store_true", help="leave the server up until interrupted")
    arguments = parser.parse_args()
    try:
        demo(arguments.work_dir, arguments.port, arguments.keep)
    except DemoError as error:
        raise SystemExit(f"demo failed: {error}") from None
    print("\nDemo passed.")


if __name__ == "__main__":
    run_command_line(main)
