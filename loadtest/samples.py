"""A load and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loadtest.bodies import Template

SAMPLE = np.dtype(
    [
        ("scheduled", "f8"),
        ("sent", "f8"),
        ("done", "f8"),
        ("status", "i2"),
        ("retry_after", "?"),
        ("right", "?"),
        ("template", "i4"),
    ]
)
"""A request: seconds from the load's start; HTTP status, 0 without an answer; whether the answer names Retry-After;
whether it is a right one; which template it was."""


@dataclass(frozen=True)
class Load:
    """An open loop.

    Attributes:
        url: the server's, for example http://127.0.0.1:8000.
        rate: requests a second, on average.
        seconds: how long they are counted.
        warmup_seconds: the same load before that, not counted.
        processes: that send it. One manages about 1,000 small requests a second on an idle core.
        give_up_seconds: after which a request counts as not answered.
        headers: of every request.
    """

    url: str
    rate: float
    seconds: float = 60.0
    warmup_seconds: float = 0.0
    processes: int = 1
    give_up_seconds: float = 30.0
    headers: tuple[tuple[str, str], ...] = ()
    path: str = "/v1/recommend"
    seed: int = 0


@dataclass
class Samples:
    """What came of a load.

    Attributes:
        started: `time.monotonic()` of the load's second 0, to place other events beside it.
        rows: structured array of `SAMPLE`, by scheduled time; those of the warm-up have a negative one.
        faults: how often what was wrong, in all requests.
    """

    load: Load
    templates: Sequence[Template]
    started: float
    rows: NDArray[np.void]
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def latency(self) -> NDArray[np.float64]:
        """Seconds from the scheduled arrival to the answer, [rows]."""
        return self.rows["done"] - self.rows["scheduled"]
