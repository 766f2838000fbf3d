"""The server over HTTP beside the engine alone, in one run: a preset with random weights on one GPU.

python -m benchmarks.serving --out benchmarks/results/h200/serving.json [--batch 16] [--seconds 60] [--work-dir DIR]

A closed loop of more clients than two batches gives the server's throughput; an open loop (Poisson arrivals) at 80 % of
it, or at `--rate`, its latency. All requests name full histories by item id.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decoders import Decoder
from benchmarks.environment import ROOT, describe_environment
from benchmarks.measure import measure, random_batches
from benchmarks.random_bundle import random_catalog, write_random_bundle
from benchmarks.results import ResultFile
from loadtest.bodies import Template, template
from loadtest.closed_loop import run_closed
from loadtest.open_loop import run
from loadtest.samples import Load
from loadtest.summary import summarize
from loka_serve.bundle import Bundle
from loka_serve.command_line import CommandParser, duration, output_file, positive, run_command_line
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.buckets import Bucket
from loka_serve.engines.hopper.engine import HopperEngine
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.errors import LokaError
from loka_serve.models.config import PRESETS

BOUND_MS = 70.0
LOAD_SHARE = 0.8
START_SECONDS = 300.0
USERS = 200


def engine_rate(bundle: Bundle, sizes: Sequence[int], device: torch.device, seconds: float) -> dict[str, Any]:
    """The engine alone at full batches of the longest context, driven from this process.

    It is opened with the server's batch sizes, so that the server finds the dispatch table that is measured here.
    """
    batch = max(sizes)
    config = bundle.config
    limits = EngineLimits(batch, config.beam_width, config.max_context, config.levels)
    options = HopperOptions(batches=tuple(sizes), beams=(limits.beam,), contexts=(limits.context,))
    engine = HopperEngine(bundle, limits, device, options)

    def capture(batch: int, beam: int, context: int) -> None:
        engine.decoder.capture(Bucket(batch, beam, context))

    capture(batch, limits.beam, limits.context)
    batches = random_batches(config, batch, limits.beam, limits.context)
    found = measure(Decoder(capture, engine.submit, engine.collect), batches, seconds)
    return {"req_per_s": found.req_per_s, "latency_ms_p50": found.latency_ms_p50}


@contextlib.contextmanager
def serving(bundle: Path, flags: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a server that is ready; it is told to end at the end of the block."""
    command = [sys.executable, "-m", "loka_serve.serve", "--bundle", str(bundle), "--port", "0", *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=os.environ)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not re.search(r"engine hopper on \S+ is ready", log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LokaError(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        address = re.search(r"listening on (http://[^;\s]+);", log.read_text())
        assert address is not None
        yield address[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def full_histories(items: int, context: int, num_items: int, seed: int = 0) -> list[Template]:
    """Requests of different users whose histories are as long as the model reads."""
    generator = np.random.default_rng(seed)
    return [
        template(
            {
                "user_id": f"user-{user}",
                "history": [f"item-{index}" for index in generator.integers(0, items, context)],
                "num_items": num_items,
            }
        )
        for user in range(USERS)
    ]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="onerec-v2-4b-a0.5b")
    parser.add_argument("--batch", type=positive, nargs="+", default=[16], help="largest batch of the server")
    parser.add_argument("--items", type=positive, default=500_000, help="of the catalog")
    parser.add_argument("--seconds", type=duration, default=60.0, help="of the open loop; the closed one takes a third")
    parser.add_argument("--rate", type=duration, help="arrivals a second; default: 80 % of the server's throughput")
    parser.add_argument("--work-dir", type=Path, help="where the bundle is written, kept and found again")
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise LokaError("the hopper engine runs on a CUDA device, and none is here")
    work = arguments.work_dir or Path(tempfile.mkdtemp(prefix="loka-serving-"))
    try:
        measure_all(arguments, work)
    finally:
        if arguments.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)


def measure_all(arguments: Any, work: Path) -> None:
    config, device = PRESETS[arguments.preset], torch.device("cuda", torch.cuda.current_device())
    path = work / "bundle"
    if not path.exists():
        catalog = random_catalog(arguments.items, config.codebook_sizes)
        write_random_bundle(path, config, "fp8", catalog, device, max(arguments.batch))
    bundle = Bundle.load(path, verify=False)
    requests = full_histories(bundle.catalog.item_count, config.max_context, num_items=20)
    result = ResultFile(arguments.out, {"environment": describe_environment(arguments.commit), "bound_ms": BOUND_MS})
    for batch in arguments.batch:
        sizes = sorted({size for size in (*range(1, 9), 10, 12, 14, 16, 20, 24, 28) if size < batch} | {batch})
        alone = engine_rate(bundle, sizes, device, seconds=3.0)
        gc.collect()
        torch.cuda.empty_cache()
        flags = [
            "--engine", "hopper", "--max-batch", str(batch), "--max-beam-width", str(config.beam_width),
            "--hopper-batches", ",".join(map(str, sizes)), "--hopper-beams", str(config.beam_width),
            "--hopper-contexts", str(config.max_context), "--engine-start-timeout-s", str(START_SECONDS),
        ]  # fmt: skip
        row: dict[str, Any] = {"batch": batch, "flags": flags, "engine": alone}
        with serving(path, flags, work / "server.log") as url:
            closed = summarize(run_closed(url, requests, 4 * batch, arguments.seconds / 3, warmup_seconds=3.0))
            row["http"] = {key: closed[key] for key in ("latency_ms", "statuses", "faults", "right")}
            row["http"]["req_per_s"] = closed["goodput"]["per_s"]
            row["http_over_engine"] = round(row["http"]["req_per_s"] / alone["req_per_s"], 4)
            print(f"batch {batch}: engine {alone['req_per_s']}, HTTP {row['http']['req_per_s']} req/s", flush=True)
            rate = arguments.rate or LOAD_SHARE * row["http"]["req_per_s"]
            load = Load(url, rate, arguments.seconds, 5.0, processes=4)
            row["open_loop"] = summarize(run(load, requests), BOUND_MS)
            row["open_loop"].pop("timeline")
        print(f"batch {batch}: at {rate:.0f} req/s {row['open_loop']['latency_ms']}", flush=True)
        result.add(row)


if __name__ == "__main__":
    run_command_line(main)
