"""Settings of `python -m loka_serve.tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from loka_serve.engines import ENGINES
from loka_serve.settings import (
    Choice,
    Device,
    Directory,
    ExistingPath,
    Integer,
    Number,
    read_settings,
    setting,
)


@dataclass(frozen=True)
class Numbers:
    """Some different numbers from `low` to `high`, with commas between."""

    low: float
    high: float
    whole: bool
    metavar: ClassVar[str] = "N,N,..."

    @property
    def expected(self) -> str:
        kind = "whole numbers" if self.whole else "numbers"
        return f"different {kind} from {self.low:g} to {self.high:g} with commas between, or auto"

    def parse(self, text: str) -> tuple[float, ...]:
        if text.strip().lower() == "auto":
            return ()
        values = tuple((int if self.whole else float)(part) for part in text.split(","))
        if len(set(values)) != len(values) or not all(self.low <= value <= self.high for value in values):
            raise ValueError(text)  # NaN lies between no bounds
        return values


@dataclass(frozen=True)
class TuneConfig:
    """What is swept, against which bound, and for how long."""

    bundle: Path = setting(Directory(), "the bundle to tune; the chosen setting is written into it", "what to tune")
    p99_ms: float = setting(
        Number(0.01, 3_600_000),
        "bound on the 99th percentile of a request's time from its arrival in the queue to its answer, without HTTP",
        "what to tune",
    )
    min_requests_per_second: float = setting(
        Number(0, 1e9), "least throughput: a narrower beam is taken where a wider one gives less", "what to tune", 0.0
    )
    histories: Path | None = setting(
        ExistingPath(),
        "user histories to ask for; without it, random ones of the longest context",
        "what to tune",
        None,
    )
    engine: str = setting(
        Choice(("auto", *ENGINES)), "what runs the bundle; auto takes the one it was built for", "what to tune", "auto"
    )
    device: str = setting(
        Device(), "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one", "what to tune", "auto"
    )
    cpu_threads: int = setting(
        Integer(0, 1024), "threads of an engine on the CPU; 0 leaves one core to the batcher", "what to tune", 0
    )

    batches: tuple[int, ...] = setting(
        Numbers(1, 4096, True), "batch sizes to try; auto doubles from 1 to the bundle's limit", "sweep", ()
    )
    delays_ms: tuple[float, ...] = setting(
        Numbers(0, 10_000, False), "delays to try, milliseconds; auto takes 0, 2 and 5", "sweep", ()
    )
    beams: tuple[int, ...] = setting(
        Numbers(1, 65_536, True), "beam widths to try; auto halves the bundle's twice", "sweep", ()
    )
    seconds: float = setting(Number(0.05, 3600), "how long to measure each load of a setting", "sweep", 1.0)
    seed: int = setting(Integer(0, 1 << 31), "seed of histories and arrivals", "sweep", 0)
    engine_start_timeout_s: float = setting(
        Number(1, 86_400), "longest time for the engine to load and warm up", "sweep", 900.0
    )

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Read the settings; a flag wins over its environment variable.

        Raises:
            ConfigError: a value that is not as expected, an unknown flag, a required setting that is missing.
        """
        return read_settings(
            cls,
            "python -m loka_serve.tune",
            "Find the batch, delay and beam that serve a bundle fastest within a latency bound; write them into it.",
            arguments,
            environment,
        )
