"""How the Hopper engine runs: choices that change speed, or rounding within a format's error, never the task."""

from __future__ import annotations

from dataclasses import dataclass

from loka_serve.errors import EngineError

CONTEXT_PRECISIONS = ("bf16", "fp8")
TOP_K = ("radix", "torch")


@dataclass(frozen=True)
class HopperOptions:
    """Options of `HopperEngine`.

    Attributes:
        context_precision: in which keys and values of the context are read by attention: `bf16` or `fp8`.
        graphs: run every bucket as one CUDA graph, captured at warm-up; otherwise kernel by kernel.
        fused: quantize activations in the kernels that produce them; otherwise in kernels of their own.
        tune: measure at load which library runs each linear, unless that is on file; otherwise take defaults.
        top_k: `radix`, our kernel, or `torch`, the library's, which breaks ties as it likes.
        batches, beams, contexts: sizes that graphs are captured for, ascending; empty: chosen from the limits.
        memory_share: part of the device's memory that weights and workspaces may fill.
        catalog_headroom: room for a larger catalog, as a multiple of the first one's nodes and of the most candidates
            that a request may have in it. A swap to one that fits keeps the graphs; a larger one captures them again.
    """

    context_precision: str = "bf16"
    graphs: bool = True
    fused: bool = True
    tune: bool = True
    top_k: str = "radix"
    batches: tuple[int, ...] = ()
    beams: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    memory_share: float = 0.92
    catalog_headroom: float = 1.25

    def __post_init__(self) -> None:
        if self.context_precision not in CONTEXT_PRECISIONS:
            raise EngineError(f"context_precision {self.context_precision!r}: expected one of {CONTEXT_PRECISIONS}")
        if self.top_k not in TOP_K:
            raise EngineError(f"top_k {self.top_k!r}: expected one of {TOP_K}")
        for name in ("batches", "beams", "contexts"):
            sizes = getattr(self, name)
            if list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes):
                raise EngineError(f"{name} {sizes}: expected ascending positive sizes")
        if not 0.0 < self.memory_share <= 1.0:
            raise EngineError(f"memory_share {self.memory_share}: expected above 0, at most 1")
        if self.catalog_headroom < 1.0:
            raise EngineError(f"catalog_headroom {self.catalog_headroom}: expected at least 1")
