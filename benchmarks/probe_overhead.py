"""What watching traffic costs: the reference engine with and without an `OnlineProbe` on one batch in N.

python -m benchmarks.probe_overhead --out RESULT.json [--preset onerec-v2-4b-a0.5b] [--covariance]

Each round times a batch without the probe and the same one observed by it, in an order that alternates; what it costs
to let a batch pass is timed by itself. At one observed batch in N the share of the time that the probe takes is

    overhead = ((observed - plain) / N + passing) / plain

of the medians; that is also what throughput loses. Timing whole runs of N batches would bury 1 % in the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from benchmarks.environment import describe_environment
from benchmarks.measure import random_batches
from benchmarks.random_model import random_model
from benchmarks.results import ResultFile, Row
from loka_serve.catalog.catalog import Catalog
from loka_serve.command_line import CommandParser, output_file, positive, run_command_line, usable_device
from loka_serve.engines.base import EngineLimits, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.models.config import PRESETS, OneRecV2Config
from loka_serve.probe.online import EVERY, MAX_ROWS, OnlineProbe

WARMUP_ROUNDS = 2
PASSED_CALLS = 10_000


@dataclasses.dataclass(frozen=True)
class Times:
    """Median seconds of a batch without a probe and of one that it observes; seconds to let one pass."""

    plain: float
    observed: float
    passing: float

    def overhead(self, every: int) -> float:
        """Share of the time without a probe that one takes which observes one batch in `every`."""
        return ((self.observed - self.plain) / every + self.passing) / self.plain


def open_engine(
    config: OneRecV2Config, batch: int, beam: int, context: int, items: int, device: torch.device
) -> ReferenceEngine:
    """The reference engine with random weights and a random catalog."""
    generator = np.random.default_rng(0)
    codes = np.stack([generator.integers(0, size, items) for size in config.codebook_sizes], 1)
    names = [str(index) for index in range(items)]
    catalog = Catalog.build(names, codes, codebook_sizes=config.codebook_sizes)
    limits = EngineLimits(batch, beam, context, config.levels)
    return ReferenceEngine(random_model(config, device).float(), catalog, limits, device)


def measure(
    engine: ReferenceEngine, batches: Sequence[RequestBatch], rounds: int, max_rows: int, covariance: bool
) -> tuple[Times, int]:
    """Median times, and bytes of what the probe keeps."""
    probe = OnlineProbe(engine.model.sites(), 1, max_rows, covariance)
    plain: list[float] = []
    observed: list[float] = []
    for turn in range(WARMUP_ROUNDS + rounds):
        batch = batches[turn % len(batches)]
        for is_observed in (turn % 2 == 0, turn % 2 == 1):
            started = time.perf_counter()
            with probe.watching(engine.model) if is_observed else nullcontext():
                engine.recommend(batch)
            if engine.device.type == "cuda":  # what the probe has put behind the batch counts
                torch.cuda.synchronize(engine.device)
            (observed if is_observed else plain).append(time.perf_counter() - started)
    before, during = (statistics.median(times[WARMUP_ROUNDS:]) for times in (plain, observed))
    return Times(before, during, seconds_to_pass(engine)), probe.state_bytes()


def seconds_to_pass(engine: ReferenceEngine) -> float:
    """What a batch costs that the probe counts and does not observe."""
    probe = OnlineProbe(engine.model.sites(), PASSED_CALLS + 1)
    probe.begin_batch()  # the one that it would observe
    started = time.perf_counter()
    for _ in range(PASSED_CALLS):
        with probe.watching(engine.model):
            pass
    return (time.perf_counter() - started) / PASSED_CALLS


def to_row(times: Times, every: int, **shape: object) -> Row:
    """The result's row."""
    return {
        **shape,
        "every": every,
        "plain_ms": round(1e3 * times.plain, 3),
        "observed_ms": round(1e3 * times.observed, 3),
        "passing_us": round(1e6 * times.passing, 3),
        "overhead": round(times.overhead(every), 5),
    }


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--beam", type=positive, default=128)
    parser.add_argument("--context", type=positive, help="history items; the preset's unless given")
    parser.add_argument("--catalog-items", type=positive, default=20_000)
    parser.add_argument("--every", type=positive, default=EVERY, help="one batch in so many is observed")
    parser.add_argument("--max-rows", type=positive, default=MAX_ROWS, help="of a site that are looked at")
    parser.add_argument("--covariance", action="store_true", help="gather covariances too")
    parser.add_argument("--rounds", type=positive, default=20)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    config = PRESETS[arguments.preset]
    context = min(arguments.context or config.max_context, config.max_context)
    shape = {"preset": arguments.preset, "batch": arguments.batch, "beam": arguments.beam, "context": context}
    device = torch.device(arguments.device)
    engine = open_engine(config, arguments.batch, arguments.beam, context, arguments.catalog_items, device)
    batches = random_batches(config, arguments.batch, arguments.beam, context)
    times, state_bytes = measure(engine, batches, arguments.rounds, arguments.max_rows, arguments.covariance)
    row = to_row(
        times,
        arguments.every,
        **shape,
        max_rows=arguments.max_rows,
        covariance=arguments.covariance,
        rounds=arguments.rounds,
        threads=torch.get_num_threads(),
        state_bytes=state_bytes,
    )
    ResultFile(arguments.out, {"environment": describe_environment()}).add(row)
    print(
        f"plain {row['plain_ms']} ms, observed {row['observed_ms']} ms a batch: "
        f"{row['overhead']:.2%} at 1 in {arguments.every}; {state_bytes / 1e6:.1f} MB kept"
    )


if __name__ == "__main__":
    run_command_line(main)
