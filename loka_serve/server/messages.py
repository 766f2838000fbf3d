"""The messages between the API process and the engine process: typed structs in msgpack frames, arrays as bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loka_serve.engines.base import SiteDrift

START_FAILED_STATUS = 2  # exit status of an engine process that said StartFailed
NAN, INVALID, EXCEPTION = "nan", "invalid", "exception"  # why a request alone failed
CATALOG = "catalog"  # why all requests of a batch failed: the engine could not go over to their catalog
CODE_TYPE = np.dtype("<i4")
SCORE_TYPE = np.dtype("<f4")


class WireRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, resolved against the catalog version of its batch.

    Attributes:
        history: int32 codes [n, levels], oldest item first.
        features: index of each feature's value in the model's order; 0 = unknown.
        beam_width: beams of the search.
        num_items: items to return at most.
        exclude: int32 item indices [m] that must not be returned.
        predicates: attribute -> values of which an item must have one, as attribute texts.
    """

    history: bytes
    features: list[int]
    beam_width: int
    num_items: int
    exclude: bytes = b""
    predicates: dict[str, list[str]] = {}


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """API -> engine: compute these requests together, on this version of the catalog."""

    batch_id: int
    catalog_version: str
    requests: list[WireRequest]


class LoadCatalog(msgspec.Struct, frozen=True, tag="load_catalog"):
    """API -> engine: read a compiled catalog beside the live one; later batches may name its version."""

    version: str
    path: str


class DropCatalog(msgspec.Struct, frozen=True, tag="drop_catalog"):
    """API -> engine: no further batch names this version."""

    version: str


class SwapCatalog(msgspec.Struct, frozen=True, tag="swap_catalog"):
    """API -> engine: make this loaded version the live one, once the batches before this message are done."""

    version: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """API -> engine: finish what was sent, then end."""


class WireResult(msgspec.Struct, frozen=True, gc=False):
    """The answer to one request of a batch.

    Attributes:
        items: int32 item indices [n], best first.
        scores: float32 log-probabilities [n].
        complete: false if fewer items exist under the filter than were asked for.
        error: why this request alone failed: scores that are no numbers (NAN), leaves that must not be there (INVALID)
            or an EXCEPTION, or with its batch, for its CATALOG; None if it did not.
    """

    items: bytes = b""
    scores: bytes = b""
    complete: bool = True
    error: str | None = None


class BatchResult(msgspec.Struct, frozen=True, tag="batch_result"):
    """Engine -> API: the answers in the order of the requests, and the seconds that each stage took."""

    batch_id: int
    results: list[WireResult]
    timings: dict[str, float]


class CatalogLoaded(msgspec.Struct, frozen=True, tag="catalog_loaded"):
    """Engine -> API: the version may be named by batches, or could not be loaded because of `error`."""

    version: str
    error: str | None = None


class SwapStarted(msgspec.Struct, frozen=True, tag="swap_started"):
    """Engine -> API: going over to another version, asked for by name or by a batch; nothing is computed meanwhile."""

    version: str


class SwapFinished(msgspec.Struct, frozen=True, tag="swap_finished"):
    """Engine -> API: the version is live, or the one before still is because of `error`."""

    version: str
    error: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Engine -> API: loaded and warmed up.

    Attributes:
        dispatch_source, dispatch_reason: of `DispatchInfo`; None from an engine without a dispatch table.
        drift_sites: the sites that a drift guard watches; none without one.
    """

    engine: str
    device: str
    max_batch: int
    max_beam_width: int
    max_context: int
    load_seconds: float
    warmup_seconds: float
    dispatch_source: str | None = None
    dispatch_reason: str | None = None
    drift_sites: tuple[str, ...] = ()


class Drift(msgspec.Struct, frozen=True, tag="drift"):
    """Engine -> API: what the drift guard found in a sampled batch, of every site that it watches."""

    sites: list[SiteDrift]


class DeviceMemory(msgspec.Struct, frozen=True, tag="device_memory"):
    """Engine -> API: bytes of the GPU that the engine's allocator holds, that all processes use, and that there are."""

    reserved: int
    used: int
    total: int


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """Engine -> API: a new attempt would fail in the same way (a damaged bundle, an unknown engine)."""

    message: str


ToEngine = Batch | LoadCatalog | DropCatalog | SwapCatalog | Stop
FromEngine = BatchResult | CatalogLoaded | SwapStarted | SwapFinished | Ready | Drift | DeviceMemory | StartFailed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Inverse of `encode` in the engine process; raises msgspec.DecodeError on anything else."""
    message: ToEngine = _to_engine.decode(frame)
    return message


def decode_from_engine(frame: bytes) -> FromEngine:
    """Inverse of `encode` in the API process; raises msgspec.DecodeError on anything else."""
    message: FromEngine = _from_engine.decode(frame)
    return message


def pack_integers(values: Any) -> bytes:
    """Little-endian int32 bytes of an array or a list of integers."""
    return np.ascontiguousarray(values, dtype=CODE_TYPE).tobytes()


def unpack_integers(data: bytes) -> NDArray[np.int32]:
    """Inverse of `pack_integers`, one-dimensional and read-only."""
    return np.frombuffer(data, dtype=CODE_TYPE)


def pack_scores(values: Any) -> bytes:
    """Little-endian float32 bytes of an array or a list of numbers."""
    return np.ascontiguousarray(values, dtype=SCORE_TYPE).tobytes()


def unpack_scores(data: bytes) -> NDArray[np.float32]:
    """Inverse of `pack_scores`, one-dimensional and read-only."""
    return np.frombuffer(data, dtype=SCORE_TYPE)
