"""Open-loop load, MLPerf Server style: requests arrive at random times (Poisson), however slowly answers come.

python -m loadtest.open_loop --url http://127.0.0.1:8000 --rate 200 --histories histories.jsonl --bound-ms 70 \
    --out load.json --plot load.svg

A request's latency counts from the moment at which it was to arrive, so a stall of the server (or of this generator)
shows in every request that would have come meanwhile. Exit code 1 if fewer than 99 % of all requests are answered
rightly within the bound, or, without a bound, if any is not answered rightly.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadtest.bodies import Template, from_histories, read_bodies, read_some_histories
from loadtest.samples import Load, Samples
from loadtest.sending import Sent, Share, send, shares
from loadtest.summary import draw, summarize
from loadtest.worker import Worker
from loka_serve.command_line import CommandParser, duration, existing_file, output_file, positive, run_command_line
from loka_serve.errors import LokaError

START_SECONDS = 60.0
AHEAD_SECONDS = 0.2
REACH_SECONDS = 10.0
WITHIN_BOUND = 0.99


def poisson_arrivals(rate: float, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """Arrival times within `seconds`, ascending: gaps are exponential with mean 1 / rate."""
    count = int(rate * seconds + 6 * math.sqrt(rate * seconds) + 10)
    times = np.cumsum(generator.exponential(1.0 / rate, count))
    while times[-1] < seconds:  # one chance in a billion
        times = np.append(times, times[-1] + generator.exponential(1.0 / rate))
    return times[times < seconds]


class RunningLoad:
    """A load that goes on in processes of its own."""

    def __init__(self, load: Load, templates: Sequence[Template]) -> None:
        if not templates:
            raise LokaError("no requests to send")
        self.load, self.templates = load, templates
        generator = np.random.default_rng(load.seed)
        arrivals = poisson_arrivals(load.rate, load.warmup_seconds + load.seconds, generator) - load.warmup_seconds
        chosen = generator.integers(0, len(templates), len(arrivals)).astype(np.int32)
        parts = shares(
            load.url.rstrip("/") + load.path,
            load.headers, templates, arrivals, chosen, load.processes, load.give_up_seconds,
        )  # fmt: skip
        self._workers = [Worker(_work, part) for part in parts]
        for worker in self._workers:
            worker.hear(START_SECONDS)
        self.started = time.monotonic() + AHEAD_SECONDS + load.warmup_seconds
        for worker in self._workers:
            worker.tell(self.started)

    def wait(self) -> Samples:
        """All samples, once the last request is answered or given up."""
        longest = self.started + self.load.seconds + self.load.give_up_seconds + START_SECONDS - time.monotonic()
        parts: list[Sent] = [worker.hear(longest) for worker in self._workers]
        for worker in self._workers:
            worker.join()
        rows = np.concatenate([part.samples for part in parts])
        faults = sum((part.faults for part in parts), Counter[str]())
        return Samples(self.load, self.templates, self.started, rows[np.argsort(rows["scheduled"])], faults)

    def stop(self) -> None:
        """End it at once; nothing is known of what it sent."""
        for worker in self._workers:
            worker.stop()


def _work(pipe: Connection, share: Share) -> None:
    pipe.send(None)
    pipe.send(send(share, pipe.recv()))


def run(load: Load, templates: Sequence[Template]) -> Samples:
    """Send a load and wait for its end."""
    return RunningLoad(load, templates).wait()


def require_server(url: str) -> None:
    """Raises LokaError unless somebody answers there."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"{url.rstrip('/')}/health/live", timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # somebody answers: what is wrong will show
    except (OSError, ValueError) as error:
        raise LokaError(f"cannot reach {url}: {getattr(error, 'reason', error)}") from None


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100_000:
        raise ArgumentTypeError(f"expected a number of requests a second from above 0 to 100,000, got {text!r}")
    return value


def _beams(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ArgumentTypeError(f"expected 'Name: value', got {text!r}")
    return name.strip(), value.strip()


def _seconds_or_none(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else duration(text)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"expected a number of milliseconds above 0, got {text!r}")
    return value


def _parse() -> Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=_rate, required=True, help="requests a second, on average")
    parser.add_argument("--seconds", type=duration, default=60.0, help="that are counted; MLPerf asks for at least 60")
    parser.add_argument(
        "--warmup", type=_seconds_or_none, default=5.0, help="seconds of the same load before, uncounted"
    )
    parser.add_argument("--processes", type=positive, default=1, help="that send; more where the lag is not near 0")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--histories", type=existing_file, help="user histories: .jsonl, MiniOneRec .csv or .txt")
    source.add_argument("--bodies", type=existing_file, help="request bodies as they stand, one JSON object a line")
    parser.add_argument("--num-items", type=positive, default=10, help="items to ask for (with --histories)")
    parser.add_argument("--beams", type=_beams, default=(), help="beam widths to mix, for example 128,512")
    parser.add_argument("--exclude-history", action="store_true")
    parser.add_argument("--timeout-ms", type=positive, help="deadline that each request names")
    parser.add_argument("--header", type=_header, action="append", default=[], help="'Name: value', of every request")
    parser.add_argument("--give-up", type=duration, default=30.0, help="seconds until a request counts as not answered")
    parser.add_argument("--bound-ms", type=_milliseconds, help="latency that a request must keep to count as goodput")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and choice")
    parser.add_argument("--out", type=output_file, help="all figures as JSON")
    parser.add_argument("--plot", type=output_file, help="latency over time and by percentile, as SVG")
    return parser.parse_args()


def main() -> None:
    options = _parse()
    if options.bodies:
        templates = read_bodies(options.bodies)
    else:
        histories = read_some_histories(options.histories, seed=options.seed)
        templates = from_histories(
            histories, options.num_items, options.beams, options.exclude_history, options.timeout_ms
        )
    require_server(options.url)
    load = Load(
        options.url, options.rate, options.seconds, options.warmup, options.processes, options.give_up,
        tuple(options.header), seed=options.seed,
    )  # fmt: skip
    samples = run(load, templates)
    summary = summarize(samples, options.bound_ms)
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    if options.plot:
        Path(options.plot).write_text(draw(samples, options.bound_ms))
    print(json.dumps({key: value for key, value in summary.items() if key != "timeline"}, indent=1))
    held = summary["goodput"]["share"] >= WITHIN_BOUND if options.bound_ms else summary["goodput"]["share"] == 1.0
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    run_command_line(main)
