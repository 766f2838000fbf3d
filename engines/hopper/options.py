"""How the Hopper engine runs: choices that change speed, or rounding within a format's error, never the task."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Self

from loka_serve.errors import EngineError

CONTEXT_PRECISIONS = ("bf16", "fp8")
TOP_K = ("radix", "torch")


@dataclass(frozen=True)
class HopperOptions:
    """Options of `HopperEngine`. Raises EngineError, which names the field, for a value that is not as described.

    Attributes:
        context_precision: in which keys and values of the context are read by attention: `bf16` or `fp8`.
        graphs: run every bucket as one CUDA graph, captured at warm-up; otherwise kernel by kernel.
        fused: quantize activations in the kernels that produce them; otherwise in kernels of their own.
        tune: measure at load which library runs each linear, unless that is on file; otherwise take defaults.
        frozen_dispatch: refuse to start, whatever `tune` says, where no table of this machine's versions is on file.
        top_k: `radix`, our kernel, or `torch`, the library's, which breaks ties as it likes.
        batches, beams, contexts: sizes that graphs are captured for, ascending; empty: chosen from the limits.
        memory_share: part of the device's memory that weights and workspaces may fill.
        catalog_headroom: room for a larger catalog, as a multiple of the first one's nodes and of the most candidates
            that a request may have in it. A swap to one that fits keeps the graphs; a larger one captures them again.
        batch_invariant: choose kernels that give a request the same bits alone, in any batch and in any order; no
            dispatch is measured or read.
    """

    context_precision: str = "bf16"
    graphs: bool = True
    fused: bool = True
    tune: bool = True
    frozen_dispatch: bool = False
    top_k: str = "radix"
    batches: tuple[int, ...] = ()
    beams: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    memory_share: float = 0.92
    catalog_headroom: float = 1.25
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.context_precision not in CONTEXT_PRECISIONS:
            raise EngineError(f"context_precision {self.context_precision!r}: expected one of {CONTEXT_PRECISIONS}")
        if self.top_k not in TOP_K:
            raise EngineError(f"top_k {self.top_k!r}: expected one of {TOP_K}")
        for name in ("graphs", "fused", "tune", "frozen_dispatch", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise EngineError(f"{name} {getattr(self, name)!r}: expected True or False")
        for name in ("batches", "beams", "contexts"):
            sizes = getattr(self, name)
            # True and 2.0 equal sizes, but are none.
            whole = isinstance(sizes, tuple) and all(type(size) is int and size >= 1 for size in sizes)
            if not whole or list(sizes) != sorted(set(sizes)):
                raise EngineError(f"{name} {sizes!r}: expected a tuple of ascending whole numbers from 1")
        if not _is_number(self.memory_share) or not 0.0 < self.memory_share <= 1.0:
            raise EngineError(f"memory_share {self.memory_share!r}: expected a number above 0, at most 1")
        if not _is_number(self.catalog_headroom) or not 1.0 <= self.catalog_headroom < math.inf:
            raise EngineError(f"catalog_headroom {self.catalog_headroom!r}: expected a finite number from 1")

    def to_json(self) -> str:
        """For the command line of another process; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote. Raises EngineError for a value that is not as described."""
        values: dict[str, Any] = json.loads(text)
        sizes = {name: tuple(values[name]) for name in ("batches", "beams", "contexts")}
        return cls(**{**values, **sizes})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
