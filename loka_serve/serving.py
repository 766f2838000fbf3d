"""The serving settings that `python -m loka_serve.tune` wrote into a bundle: a server's defaults. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loka_serve.errors import BundleError

SERVING_FILE = "serving.json"


@dataclass(frozen=True)
class ServingDefaults:
    """What a server of the bundle does unless its settings say otherwise.

    Attributes:
        engine: the engine that was tuned; the figures mean nothing for another.
        max_batch: most requests that are computed together.
        max_delay_ms: longest time that a request waits for others to share its batch.
        beam_width: beams of a request that names none.
    """

    engine: str
    max_batch: int
    max_delay_ms: float
    beam_width: int

    def to_dict(self) -> dict[str, Any]:
        """As under ``chosen`` in ``serving.json``."""
        return asdict(self)


def read_serving(directory: Path) -> ServingDefaults | None:
    """The bundle's tuned settings; None if it was never tuned.

    Raises:
        BundleError: names the file and the field that is not as expected.
    """
    file = directory / SERVING_FILE
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_bytes())["chosen"]
        chosen = {name: values[name] for name in ("engine", "max_batch", "max_delay_ms", "beam_width")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(f'{file}: expected an object "chosen" with the tuned settings: {error!r}') from None
    if not isinstance(chosen["engine"], str):
        raise BundleError(f"{file}: engine: expected a name, found {chosen['engine']!r}")
    for name in ("max_batch", "beam_width"):
        if type(chosen[name]) is not int or not 1 <= chosen[name] <= 65_536:
            raise BundleError(f"{file}: {name}: expected a whole number from 1 to 65536, found {chosen[name]!r}")
    delay = chosen["max_delay_ms"]
    if type(delay) not in (int, float) or not (math.isfinite(delay) and 0 <= delay <= 10_000):
        raise BundleError(f"{file}: max_delay_ms: expected a number from 0 to 10000, found {delay!r}")
    return ServingDefaults(**chosen)
