"""Libraries that compute a dense linear, one adapter each, all optional but torch: see `ADAPTERS`."""

from __future__ import annotations

from ..presence import Presence
from ..tilings import TILINGS
from .base import Adapter, Problem
from .cublaslt import CublasLt
from .deep_gemm import DeepGemm
from .fbgemm import Fbgemm
from .flashinfer import FlashInfer
from .torchao import TorchAo
from .triton import Triton

__all__ = ["ADAPTERS", "Adapter", "Presence", "Problem", "adapter_of", "library_of", "presences"]

ADAPTERS: tuple[Adapter, ...] = (CublasLt(), DeepGemm(), Fbgemm(), TorchAo(), FlashInfer(), Triton(TILINGS))
"""In the order in which they are taken where nothing was measured: torch first, which is always there."""

_BY_IMPLEMENTATION = {name: adapter for adapter in ADAPTERS for name in adapter.implementations}


def adapter_of(implementation: str) -> Adapter | None:
    """The adapter that runs an implementation; None for `reference` and for a name that does not exist."""
    return _BY_IMPLEMENTATION.get(implementation)


def library_of(implementation: str) -> str:
    """The library behind an implementation, as tables name it."""
    adapter = adapter_of(implementation)
    return implementation if adapter is None else adapter.library


def presences() -> tuple[Presence, ...]:
    """What of the libraries is here: a version each, or the reason for its absence. Imports them."""
    return tuple(adapter.presence() for adapter in ADAPTERS)
