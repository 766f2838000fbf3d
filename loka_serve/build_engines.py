"""`--engine auto`: a bundle for every engine that runs here, measured; the fastest that passes the gate stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from loka_serve.build_config import BuildConfig
from loka_serve.bundle import staging_directory
from loka_serve.compare import seconds_per_history
from loka_serve.engines import ENGINES
from loka_serve.engines.base import EngineLimits, EngineRequest
from loka_serve.engines.hopper.support import check_device
from loka_serve.errors import BundleError, EngineError
from loka_serve.gate import GateResult


class Outcome(Protocol):
    """What a build gives, as far as engines are compared by it."""

    @property
    def path(self) -> Path: ...

    @property
    def gate(self) -> GateResult: ...


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


@dataclass(frozen=True)
class Candidate:
    """One engine.

    Attributes:
        milliseconds_per_history: None where the engine does not run here; then `reason` says why.
    """

    engine: str
    milliseconds_per_history: float | None = None
    gate: GateResult | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        gate = self.gate
        return {
            "engine": self.engine,
            "milliseconds_per_history": self.milliseconds_per_history,
            "gate_passed": None if gate is None else gate.passed,
            "top_k": None if gate is None else gate.top_k,
            "top_k_overlap": None if gate is None else gate.top_k_overlap,
            "reason": self.reason,
        }


def build_fastest(
    config: BuildConfig,
    limits: EngineLimits,
    requests: Sequence[EngineRequest],
    device: torch.device,
    build: Callable[[BuildConfig], OutcomeT],
    keep: Callable[[OutcomeT, dict[str, Any]], OutcomeT],
) -> OutcomeT:
    """Build for each engine, time each, and keep the fastest of those that pass the gate; of all, if none does.

    Args:
        limits, requests: of the batches that are timed, and the histories in them.
        build: as `loka_serve.build.build`.
        keep: takes the chosen outcome, whose bundle is in a directory that is removed afterwards, and the content of
            ``engines.json``; gives it in its place.

    Raises:
        EngineError: no engine runs here; says why for each.
    """
    candidates: list[Candidate] = []
    outcomes: dict[str, OutcomeT] = {}
    with staging_directory(config.out.with_name(f"{config.out.name}.engines")) as folder:
        for engine in ENGINES:
            one = replace(config, engine=engine, out=folder / engine)
            try:
                if engine == "hopper":
                    check_device(device)  # before all the work that would be for nothing
                outcome = build(one)
                seconds = seconds_per_history(outcome.path, engine, limits, requests, device)
            except (EngineError, BundleError) as error:
                candidates.append(Candidate(engine, reason=str(error)))
                continue
            outcomes[engine] = outcome
            candidates.append(Candidate(engine, 1000 * seconds, outcome.gate))
        if not outcomes:
            reasons = "; ".join(f"{one.engine}: {one.reason}" for one in candidates)
            raise EngineError(f"--engine auto: no engine runs here: {reasons}")
        chosen = choose_engine(candidates)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        values = {
            "chosen": chosen,
            "timed_on": f"{name}, batches of {limits.batch}",
            "engines": [candidate.to_dict() for candidate in candidates],
        }
        return keep(outcomes[chosen], values)


def choose_engine(candidates: Sequence[Candidate]) -> str:
    """The fastest that passes the gate; if none does, the fastest of all that run."""
    timed = [one for one in candidates if one.milliseconds_per_history is not None and one.gate is not None]
    passed = [one for one in timed if one.gate is not None and one.gate.passed]
    return min(passed or timed, key=lambda one: one.milliseconds_per_history or 0.0).engine


def format_engines(values: dict[str, Any]) -> list[str]:
    """Lines for a terminal: what each engine takes, and which was kept."""
    lines = []
    for one in values["engines"]:
        if one["milliseconds_per_history"] is None:
            lines.append(f"{one['engine']}: does not run here: {one['reason']}")
            continue
        gate = "passed" if one["gate_passed"] else "FAILED"
        overlap = f"top-{one['top_k']} overlap with BF16 {one['top_k_overlap']:.3f}"
        kept = ", kept" if one["engine"] == values["chosen"] else ""
        lines.append(
            f"{one['engine']}: {one['milliseconds_per_history']:.3g} ms a history, gate {gate}: {overlap}{kept}"
        )
    return [*lines, f"timed on {values['timed_on']}"]
