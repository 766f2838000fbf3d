"""What every engine takes and gives: limits, requests, results and the `Engine` protocol. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.filters import CatalogFilter
from loka_serve.errors import EngineError

DISPATCH_SOURCES = ("measured", "loaded", "defaults")
DISPATCH_REASONS = ("", "off", "no_file", "unreadable", "other_environment", "incomplete")


@dataclass(frozen=True)
class EngineLimits:
    """The largest batch that an engine takes: requests, beams a request, history items a request, SID levels."""

    batch: int
    beam: int
    context: int
    levels: int


@dataclass(frozen=True)
class EngineRequest:
    """One user to recommend for.

    Attributes:
        history: int32 [items, levels], SID codes, oldest first; may be empty.
        features: int32 [features], index of each static feature's value, 0 for unknown.
        beam_width: beams of this request.
        filter: allowed items and trie nodes, or None when all are.
    """

    history: NDArray[np.int32]
    features: NDArray[np.int32]
    beam_width: int
    filter: CatalogFilter | None = None


@dataclass(frozen=True)
class RequestBatch:
    """Requests that run together; their lengths and beam widths may differ."""

    requests: tuple[EngineRequest, ...]

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True)
class BeamResult:
    """Ranked leaves of each request, best first; ties go to the lower leaf.

    Attributes:
        leaves: int32 [batch, widest beam], catalog leaf indices, -1 where a request has fewer.
        scores: float32 [batch, widest beam], log-probability of the SID, -inf where a request has fewer.
        counts: int32 [batch], leaves of each request.
        failed: bool [batch], requests whose scores were not numbers; their leaves are not to be used.
        timings: seconds by stage (context, decode, selection); where it is known also by level, as `decode.0`.
    """

    leaves: NDArray[np.int32]
    scores: NDArray[np.float32]
    counts: NDArray[np.int32]
    failed: NDArray[np.bool_]
    timings: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Runs a bundle: context processing and all decode levels in one call of fixed steps."""

    name: str
    limits: EngineLimits

    def recommend(self, batch: RequestBatch) -> BeamResult:
        """Rank leaves for each request. Raises EngineError when the batch exceeds `limits`."""
        ...

    def warmup(self) -> None:
        """Run once at the limits, so that the first request pays for nothing."""
        ...

    def swap_catalog(self, catalog: Catalog) -> None:
        """Serve another catalog from the next batch on; called while no batch is on its way.

        Whatever it raises, the catalog before is live as if nothing had been asked for.

        Raises:
            EngineError: the codebooks do not fit the model, or the catalog not the device's memory.
        """
        ...


@dataclass(frozen=True)
class DispatchInfo:
    """Where an engine has its dispatch table from.

    Attributes:
        source: one of `DISPATCH_SOURCES`.
        reason: one of `DISPATCH_REASONS`: why the table is not a loaded one; empty if it is.
    """

    source: str
    reason: str = ""


@runtime_checkable
class DispatchedEngine(Engine, Protocol):
    """An engine that chooses implementations by a dispatch table."""

    dispatch_info: DispatchInfo


@dataclass(frozen=True)
class SiteDrift:
    """How far a site's inputs are from calibration's.

    Attributes:
        psi: population stability index; None before enough was seen.
        amax_ratio: largest input over calibration's largest; None before enough was seen.
        in_fallback: the site computes in BF16 instead of its recipe.
        fell_back: it does so since this judgement.
    """

    site: str
    psi: float | None
    amax_ratio: float | None
    in_fallback: bool
    fell_back: bool = False


@runtime_checkable
class DriftWatchingEngine(Engine, Protocol):
    """An engine that compares its sites' inputs with calibration's, and puts those that drift into BF16.

    Attributes:
        drift_sites: names of the sites that it watches.
    """

    drift_sites: tuple[str, ...]

    def judge_drift(self) -> list[SiteDrift] | None:
        """Act on what batches have shown; None if there is nothing new. Called between batches."""
        ...


class Ticket(Protocol):
    """A batch on its way; only the engine that gave it can read it."""

    @property
    def requests(self) -> int: ...


@runtime_checkable
class AsynchronousEngine(Engine, Protocol):
    """An engine that computes on its own while the caller prepares the next batch: `recommend` in two halves.

    Batches are collected in the order of submission, failed ones too. `recommend`, which is both halves at once, is
    therefore called only when every batch before it has been collected.

    Attributes:
        in_flight: batches that may be submitted and not yet collected.
    """

    in_flight: int

    def submit(self, batch: RequestBatch) -> Ticket:
        """Start a batch. Raises EngineError when it exceeds `limits`, or when `in_flight` others are on their way."""
        ...

    def is_done(self, ticket: Any) -> bool:
        """Whether `collect` would not wait."""
        ...

    def collect(self, ticket: Any) -> BeamResult:
        """Wait for the result of the oldest batch. Whatever it raises, the batch is no longer on its way."""
        ...


def check_batch(batch: RequestBatch, limits: EngineLimits, feature_count: int, codebook_sizes: Sequence[int]) -> None:
    """Refuse what an engine cannot run.

    Raises:
        EngineError: names the request and the limit or shape that it breaks.
    """
    if not 1 <= len(batch) <= limits.batch:
        raise EngineError(f"batch of {len(batch)} requests: expected 1 to {limits.batch}")
    for index, request in enumerate(batch.requests):
        if not 1 <= request.beam_width <= limits.beam:
            raise EngineError(f"request {index}: beam width {request.beam_width}: expected 1 to {limits.beam}")
        history = request.history
        if history.ndim != 2 or history.shape[1] != limits.levels or history.shape[0] > limits.context:
            raise EngineError(
                f"request {index}: history of shape {history.shape}: expected [0 to {limits.context}, {limits.levels}]"
            )
        if history.size and ((history < 0).any() or (history >= np.asarray(codebook_sizes)).any()):
            raise EngineError(f"request {index}: history holds a code outside the codebooks {tuple(codebook_sizes)}")
        if request.features.shape != (feature_count,):
            raise EngineError(f"request {index}: features {request.features.shape}: expected [{feature_count}]")
