"""Which settings are measured, and which of them is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loka_serve.errors import TuningError
from loka_serve.tuning.load import Load, Point, Setting

CONFIRMED = 3
"""Settings that are measured again with arrivals at random times, best first."""
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Of the throughput with clients that wait for each other: the rates of arrivals that are tried."""


@dataclass(frozen=True)
class Grid:
    """What is swept; beams widest first, the others ascending."""

    batches: tuple[int, ...]
    delays_ms: tuple[float, ...]
    beams: tuple[int, ...]

    @property
    def settings(self) -> int:
        """Settings at most; a batch of one has nothing to wait for, so one delay."""
        per_beam = sum(1 if batch == 1 else len(self.delays_ms) for batch in self.batches)
        return per_beam * len(self.beams)


@dataclass(frozen=True)
class Bounds:
    """What a setting must reach."""

    p99_ms: float
    min_requests_per_second: float = 0.0


@dataclass(frozen=True)
class Tuning:
    """What was measured and chosen.

    Attributes:
        points: with clients that ask again at once.
        confirmations: with arrivals at random times, of the best settings.
        chosen: one of the confirmations; its rate keeps the bound.
    """

    points: tuple[Point, ...]
    confirmations: tuple[Point, ...]
    chosen: Point


async def tune(
    load: Load, grid: Grid, bounds: Bounds, seconds: float, progress: Callable[[Point], object] = lambda point: None
) -> Tuning:
    """Measure the grid and choose: the widest beam that meets the bounds, and of its settings the fastest.

    A wide beam comes first because it finds better items, which no throughput shows. Within a beam, batches grow until
    a batch alone takes longer than the bound. The best settings are measured again with arrivals at random times, as
    real users come: what counts is the highest such rate whose p99 keeps the bound.

    Raises:
        TuningError: no setting meets the bounds; says which came closest.
        EngineError: the engine failed.
    """
    points: list[Point] = []
    confirmations: list[Point] = []
    for beam in grid.beams:
        of_beam = await _measure_beam(load, grid, beam, bounds, seconds, progress)
        points += of_beam
        rates: list[Point] = []
        for candidate in candidates(of_beam, bounds)[:CONFIRMED]:
            rates += await _confirm(load, candidate, bounds, seconds, progress)
        confirmations += rates
        chosen = best(rates, bounds)
        if chosen is not None:
            return Tuning(tuple(points), tuple(confirmations), chosen)
    raise TuningError(_nearest([*points, *confirmations], bounds))


def candidates(points: Sequence[Point], bounds: Bounds) -> list[Point]:
    """The fastest point within the bounds of each setting, fastest first."""
    fastest: dict[Setting, Point] = {}
    for point in sorted(points, key=lambda point: -point.requests_per_second):
        if point.p99_ms <= bounds.p99_ms and point.requests_per_second >= bounds.min_requests_per_second:
            fastest.setdefault(point.setting, point)
    return list(fastest.values())


def best(points: Sequence[Point], bounds: Bounds) -> Point | None:
    """The fastest point within the bounds; of two as fast, the one with the smaller batch."""
    within = candidates(points, bounds)
    return min(within, key=lambda point: (-point.requests_per_second, point.setting.max_batch), default=None)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both p99 and throughput, by p99."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.p99_ms, -point.requests_per_second)):
        if not kept or point.requests_per_second > kept[-1].requests_per_second:
            kept.append(point)
    return kept


async def _measure_beam(
    load: Load, grid: Grid, beam: int, bounds: Bounds, seconds: float, progress: Callable[[Point], object]
) -> list[Point]:
    points: list[Point] = []
    for batch in grid.batches:
        of_batch: list[Point] = []
        for delay in grid.delays_ms[:1] if batch == 1 else grid.delays_ms:
            for clients in sorted({max(1, batch // 2), batch, 2 * batch}):
                point = await load.closed(Setting(batch, delay, beam), clients, seconds, bounds.p99_ms)
                of_batch.append(point)
                progress(point)
                if point.p99_ms > bounds.p99_ms:
                    break  # more clients wait longer still
        points += of_batch
        if all(point.p99_ms > bounds.p99_ms for point in of_batch):
            break  # and so do larger batches
    return points


async def _confirm(
    load: Load, candidate: Point, bounds: Bounds, seconds: float, progress: Callable[[Point], object]
) -> list[Point]:
    points = []
    for share in SHARES:
        point = await load.open(candidate.setting, share * candidate.requests_per_second, seconds)
        points.append(point)
        progress(point)
        if point.p99_ms <= bounds.p99_ms:
            break
    return points


def _nearest(points: Sequence[Point], bounds: Bounds) -> str:
    asked = f"p99 of at most {bounds.p99_ms:g} ms"
    if bounds.min_requests_per_second:
        asked += f" at {bounds.min_requests_per_second:g} requests/s or more"
    within = [point for point in points if point.p99_ms <= bounds.p99_ms]
    if within:
        nearest = max(within, key=lambda point: point.requests_per_second)
        advice = "ask for fewer requests/s, a longer time or a narrower beam (--beams)"
    else:
        nearest = min(points, key=lambda point: point.p99_ms)
        advice = f"ask for --p99-ms {nearest.p99_ms * 1.1:.3g} or more, or a narrower beam (--beams)"
    setting = nearest.setting
    return (
        f"no setting reaches a {asked}; nearest: batch {setting.max_batch}, delay {setting.max_delay_ms:g} ms, "
        f"beam {setting.beam_width} with {nearest.load}: p99 {nearest.p99_ms:.3g} ms, "
        f"{nearest.requests_per_second:.4g} requests/s; {advice}"
    )
