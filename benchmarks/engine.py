"""Times the Hopper engine on random weights at every batch shape, beside its floor and an independent yardstick.

python -m benchmarks.engine --out benchmarks/results/h200/engine.json [--yardstick SCRIPT] [--only 'fp8/b8/*' ...]

A row's name is precision/bBATCH/wBEAM/cCONTEXT/CATALOG: fp8/b8/w512/c3000/10m. `floor_ms` is explained in
benchmarks/floor.py, `floor_ratio` is the median latency over it. The yardstick computes in BF16 and unconstrained;
its times stand beside every row of the same shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

import torch

from benchmarks.ceilings import measure_ceilings
from benchmarks.decoders import Decoder, OpenDecoder, Options, open_decoder
from benchmarks.environment import describe_environment
from benchmarks.floor import Ceilings, floor_ms
from benchmarks.measure import Measurement, measure, random_batches
from benchmarks.power import PowerMeter, open_power_meter
from benchmarks.results import ResultFile, Row
from benchmarks.synthetic_catalog import skewed_trie
from benchmarks.yardstick import Shape, YardstickTimes, run_yardstick
from loka_serve.catalog.trie import Trie
from loka_serve.command_line import CommandParser, duration, existing_file, output_file, positive, run_command_line
from loka_serve.errors import ConfigError, LokaError
from loka_serve.models.config import PRESETS, OneRecV2Config

PRESET = "onerec-v2-4b-a0.5b"
# What the project is judged by comes first, should time run out.
PRECISIONS, CATALOGS = ("fp8", "bf16"), ("none", "10m")
BEAMS, CONTEXTS, BATCHES = (512, 128), (3000, 512), (8, 1, 32, 4, 16)
CATALOG_ITEMS = 10_000_000


class Case(NamedTuple):
    """What a row measures."""

    precision: str
    batch: int
    beam: int
    context: int
    catalog: str

    @property
    def name(self) -> str:
        return f"{self.precision}/b{self.batch}/w{self.beam}/c{self.context}/{self.catalog}"

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.beam, self.context)


def all_cases() -> list[Case]:
    """In the order of measurement: cases of one decoder follow each other."""
    groups = itertools.product(CATALOGS, PRECISIONS)
    shapes = list(itertools.product(BEAMS, CONTEXTS, BATCHES))
    return [
        Case(precision, batch, beam, context, catalog)
        for catalog, precision in groups
        for beam, context, batch in shapes
    ]


def select_cases(patterns: Sequence[str] | None) -> list[Case]:
    """Cases whose name fits one of the shell patterns; all without patterns. Raises ConfigError if none does."""
    chosen = [case for case in all_cases() if patterns is None or any(fnmatch(case.name, p) for p in patterns)]
    if not chosen:
        raise ConfigError(f"--only: expected patterns of names like {all_cases()[0].name}, no row fits {patterns}")
    return chosen


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all rows are measured with; `deadline` in seconds of `time.monotonic`."""

    preset: str
    config: OneRecV2Config
    device: torch.device
    tries: Mapping[str, Trie | None]
    ceilings: Ceilings
    yardstick: Mapping[Shape, YardstickTimes]
    meter: PowerMeter | None
    seconds: float
    context_precision: str
    deadline: float
    open_decoder: OpenDecoder = open_decoder

    def rows(self, cases: Sequence[Case]) -> Iterator[Row]:
        """Measure; a case that fails, or comes after the deadline, is reported and left out."""
        for (precision, catalog), group in itertools.groupby(cases, lambda case: (case.precision, case.catalog)):
            members = list(group)
            if time.monotonic() > self.deadline:
                print(f"out of time: {len(members)} rows of {precision}, catalog {catalog}, are left out", flush=True)
                continue
            options = {"precision": precision, "context_precision": self.context_precision_of(precision)}
            try:
                decoder = self._open(members, options)
            except Exception as error:
                report(f"{len(members)} rows of {precision}, catalog {catalog}", error)
                continue
            for case in members:
                if time.monotonic() > self.deadline:
                    print(f"out of time: {case.name} is left out", flush=True)
                    continue
                try:
                    row = self.row(case, self.measure(decoder, case))
                except Exception as error:
                    report(case.name, error)
                else:
                    yield row
            del decoder
            release_memory()

    def _open(self, cases: Sequence[Case], options: Options) -> Decoder:
        started = time.monotonic()
        catalog = cases[0].catalog
        shapes = [case.shape for case in cases]
        decoder = self.open_decoder(self.config, self.tries[catalog], shapes, self.device, options)
        print(f"{options['precision']}, catalog {catalog}: ready in {time.monotonic() - started:.1f} s", flush=True)
        return decoder

    def context_precision_of(self, precision: str) -> str:
        """A BF16 engine has BF16 attention."""
        return self.context_precision if precision == "fp8" else "bf16"

    def measure(self, decoder: Decoder, case: Case) -> Measurement:
        started = time.monotonic()
        decoder.capture(*case.shape)
        print(f"{case.name:28} captured in {time.monotonic() - started:5.1f} s", end="", flush=True)
        batches = random_batches(self.config, *case.shape)
        return measure(decoder, batches, self.seconds, self.meter)

    def row(self, case: Case, measured: Measurement) -> Row:
        attention = self.context_precision_of(case.precision)
        floor = floor_ms(self.config, case.precision, *case.shape, self.ceilings, attention)
        beside = self.yardstick.get(case.shape, YardstickTimes())
        print(
            f"  p50 {measured.latency_ms_p50:8.2f} ms  p99 {measured.latency_ms_p99:8.2f} ms  "
            f"{measured.req_per_s:7.1f} req/s  {measured.latency_ms_p50 / floor:5.2f}x floor",
            flush=True,
        )
        return {
            "preset": self.preset,
            **case._asdict(),
            **dataclasses.asdict(measured),
            "floor_ms": round(floor, 3),
            "floor_ratio": round(measured.latency_ms_p50 / floor, 3),
            "yardstick_eager_ms": beside.eager_ms,
            "yardstick_graph_ms": beside.graph_ms,
            "context_precision": attention,
        }


def report(what: str, error: Exception) -> None:
    """Whatever went wrong: the other rows are still worth their time."""
    print(f"\n{what} failed: {type(error).__name__}: {str(error)[:400]}", flush=True)


def release_memory() -> None:
    """Give a dropped decoder's memory back, also what only the garbage collector reaches."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument(
        "--yardstick", type=existing_file, help="script that times another implementation in the same run"
    )
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="rows to measure, shell patterns of names")
    parser.add_argument(
        "--keep", type=existing_file, metavar="JSON", help="earlier result whose other rows are taken over"
    )
    parser.add_argument("--preset", choices=PRESETS, default=PRESET)
    parser.add_argument("--context-precision", choices=("bf16", "fp8"), default="bf16", help="of the FP8 engine")
    parser.add_argument("--seconds", type=duration, default=0.6, help="of measuring a row, in each of two ways")
    parser.add_argument("--budget", type=duration, default=300.0, help="seconds after which no further row is started")
    parser.add_argument(
        "--catalog-items", type=positive, default=CATALOG_ITEMS, help="of the catalog that is named 10m"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    cases = select_cases(arguments.only)
    if not torch.cuda.is_available():
        raise LokaError("the Hopper engine is timed on a CUDA device, and none is here")
    deadline = time.monotonic() + arguments.budget
    yardstick = run_yardstick(arguments.yardstick)
    for shape, times in yardstick.items():
        print(f"yardstick {shape}: eager {times.eager_ms} ms, graph {times.graph_ms} ms")
    ceilings = measure_ceilings()
    print(ceilings)
    release_memory()

    config = PRESETS[arguments.preset]
    result = ResultFile(
        arguments.out,
        {
            "environment": describe_environment(),
            "ceilings": dataclasses.asdict(ceilings),
            "yardstick": [{**shape._asdict(), **times._asdict()} for shape, times in yardstick.items()],
        },
    )
    if arguments.keep:
        result.keep(arguments.keep, Case._fields, {tuple(case) for case in cases})
    tries: dict[str, Trie | None] = {"none": None}
    if any(case.catalog == "10m" for case in cases):
        tries["10m"] = skewed_trie(arguments.catalog_items, config.codebook_sizes)
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(
        preset=arguments.preset,
        config=config,
        device=device,
        tries=tries,
        ceilings=ceilings,
        yardstick=yardstick,
        meter=open_power_meter(),
        seconds=arguments.seconds,
        context_precision=arguments.context_precision,
        deadline=deadline,
    )
    measured = 0
    for row in bench.rows(cases):
        result.add(row)
        measured += 1
    if measured < len(cases):
        raise SystemExit(f"error: {measured} of {len(cases)} rows were measured")


if __name__ == "__main__":
    run_command_line(main)
