"""Closed-loop load with real histories and mixed beams; exit code 1 on any failed request or a p95 above the bound.

locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 --users 16 --spawn-rate 16 --run-time 30s \
    --histories FILE --p95-ms 200
"""

from __future__ import annotations

import http.client
import itertools
import logging
import random
import sys
import urllib.error
import urllib.request
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from loadtest.answers import beam_mix, fault_of
from loka_serve.catalog.histories import History, read_histories
from loka_serve.errors import LokaError

logger = logging.getLogger(__name__)

MOST_HISTORIES = 20_000  # held in memory
REACH_SECONDS = 10.0
QUIT_AFTER_SECONDS = 0.5
PAUSE_SECONDS = 0.1  # of a client that was refused
MOST_UNREACHED = 10  # requests in a row that no server took, before the test ends


def _beams(text: str) -> list[int]:
    try:
        beams = [int(part) for part in text.split(",")]
    except ValueError:
        beams = []
    if not beams or min(beams) < 1:
        raise ArgumentTypeError(f"expected whole numbers with commas between them, got {text!r}")
    return beams


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    """Flags of this file; each is also an environment variable."""
    group = parser.add_argument_group("loka-serve", "What to send, and what is good enough.")
    group.add_argument(
        "--histories", env_var="LOKA_HISTORIES", help="histories to send: .jsonl, MiniOneRec .csv or .txt"
    )
    group.add_argument("--p95-ms", type=float, default=0.0, env_var="LOKA_P95_MS", help="bound on the p95; 0 for none")
    group.add_argument("--num-items", type=int, default=10, env_var="LOKA_NUM_ITEMS", help="items to ask for")
    group.add_argument(
        "--beams", type=_beams, default=None, env_var="LOKA_BEAMS",
        help="beam widths to mix, for example 16,32,64; by default narrow, the model's own, and wide",
    )  # fmt: skip
    group.add_argument(
        "--allow-refusals", action="store_true", env_var="LOKA_ALLOW_REFUSALS",
        help="429 and 503 with Retry-After are right answers of a server under more load than it can take",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, env_var="LOKA_SEED", help="of the order and the mix")


class Shared:
    """What all users of this process send."""

    histories: list[History] = []
    random = random.Random(0)
    unreached = 0


@events.test_start.add_listener
def read_inputs(environment: Environment, **_: Any) -> None:
    """Read the histories once, before the first request."""
    options = environment.parsed_options
    if not options.histories:
        _refuse(environment, "--histories (or LOKA_HISTORIES) is missing: expected a file of user histories")
        return
    try:
        Shared.histories = list(itertools.islice(read_histories(options.histories), MOST_HISTORIES))
    except LokaError as error:
        _refuse(environment, str(error))
        return
    Shared.random = random.Random(options.seed)
    Shared.unreached = 0
    _require_server(environment)


def _require_server(environment: Environment) -> None:
    """End the test with one line, instead of a traceback from each user, if nobody answers at the host."""
    try:
        # Without a proxy, as locust's own requests.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"{environment.host}/v1/models", timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # somebody answers: what is wrong will show
    except (OSError, ValueError, http.client.HTTPException) as error:
        _refuse(environment, f"cannot reach {environment.host}: {getattr(error, 'reason', error)}", exit_code=1)


def _refuse(environment: Environment, message: str, exit_code: int = 2) -> None:
    """End the test with one line; only the first one counts."""
    if environment.process_exit_code is not None:
        return
    logger.error(message)
    environment.process_exit_code = exit_code
    if environment.runner is not None:
        # From a greenlet of its own, later: quitting kills its caller, and a test that is only starting would go on.
        gevent.spawn_later(QUIT_AFTER_SECONDS, environment.runner.quit)


@events.quitting.add_listener
def judge(environment: Environment, **_: Any) -> None:
    """Exit code 1 unless every request was answered rightly, and fast enough."""
    if environment.process_exit_code is not None:
        return  # ended early, and said why
    total = environment.stats.total
    p95 = total.get_response_time_percentile(0.95) or 0.0
    bound = environment.parsed_options.p95_ms
    reasons = []
    if total.num_requests == 0:
        reasons.append("no request was sent")
    if total.num_failures:
        reasons.append(f"{total.num_failures} of {total.num_requests} requests failed")
    if bound and p95 > bound:
        reasons.append(f"p95 {p95:.0f} ms is above {bound:.0f} ms")
    for reason in reasons:
        logger.error("failed: %s", reason)
    if not reasons:
        logger.info("passed: %d requests, none failed, p95 %.0f ms", total.num_requests, p95)
    environment.process_exit_code = 1 if reasons else 0


class Shopper(FastHttpUser):
    """Asks for one history after the other, without a pause."""

    wait_time = constant(0)
    headers: ClassVar[dict[str, str]] = {}
    fields: ClassVar[dict[str, Any]] = {}
    label = ""

    def on_start(self) -> None:
        """Ask the server for its beams."""
        options = self.environment.parsed_options
        self.num_items = options.num_items
        self.beams = options.beams
        if self.beams is None:
            response = self.client.get("/v1/models")
            if response.status_code != 200:  # counted as a failed request already; the next ones will say more
                self.beams = [self.num_items]
                return
            model = response.json()["models"][0]
            self.beams = beam_mix(self.num_items, model["beam_width"], model["limits"]["max_beam_width"])

    @task
    def recommend(self) -> None:
        """One history, one of the beam widths, at times without the items already bought."""
        history = Shared.random.choice(Shared.histories)
        beam_width = Shared.random.choice(self.beams)
        body: dict[str, Any] = {
            "user_id": history.user_id,
            "history": history.items,
            "num_items": self.num_items,
            "beam_width": beam_width,
            "exclude_history": Shared.random.random() < 0.5,
            **self.fields,
        }
        name = f"/v1/recommend, {self.label or f'{beam_width} beams'}"
        with self.client.post(
            "/v1/recommend", json=body, headers=self.headers, name=name, catch_response=True
        ) as response:
            if response.status_code == 0:
                response.failure(f"no answer: {response.error}")
                Shared.unreached += 1
                if Shared.unreached == MOST_UNREACHED:
                    _refuse(self.environment, f"cannot reach {self.environment.host}: {response.error}", exit_code=1)
                return
            Shared.unreached = 0
            if (
                self.environment.parsed_options.allow_refusals
                and response.status_code in (429, 503)
                and response.headers.get("retry-after")
            ):
                response.success()
                gevent.sleep(PAUSE_SECONDS)
                return
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text}")
                return
            fault = fault_of(response.json(), self.num_items)
            if fault is not None:
                response.failure(fault)
