"""When the drift guard looks, and what it takes for drift. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Self

from loka_serve.errors import EngineError


@dataclass(frozen=True)
class DriftOptions:
    """Options of `DriftGuard`. Raises EngineError, which names the field, for a value that is not as described.

    Attributes:
        sample_every: one batch in so many is looked at; 0: none, there is no guard.
        window: sampled requests that a judgement is made of; sites are not judged on fewer.
        psi_limit: population stability index beyond which a site has drifted. By custom below 0.1 is no change and
            above 0.25 a large one (Siddiqi, Credit Risk Scorecards, 2006); on the groceries example other users stay
            below 0.03.
        amax_ratio: largest input over calibration's, beyond which a site has drifted.
    """

    sample_every: int = 50
    window: int = 256
    psi_limit: float = 0.2
    amax_ratio: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("sample_every", 0), ("window", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:  # True equals 1, but is no number
                raise EngineError(f"{name} {value!r}: expected a whole number from {least}")
        for name, bound in (("psi_limit", 0.0), ("amax_ratio", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not bound < value < math.inf:
                raise EngineError(f"{name} {value!r}: expected a finite number above {bound:g}")

    @property
    def calm_psi(self) -> float:
        """Up to which a site that drifted is calm again: half the limit, so that no site goes back and forth."""
        return self.psi_limit / 2

    @property
    def calm_amax_ratio(self) -> float:
        """As `calm_psi`: half of what the limit allows beyond calibration."""
        return (1.0 + self.amax_ratio) / 2

    def to_json(self) -> str:
        """For the command line of another process; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote. Raises EngineError for a value that is not as described."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values)
