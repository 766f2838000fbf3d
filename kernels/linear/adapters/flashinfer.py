"""FlashInfer: block scales on Hopper, and cuBLAS with scales a tensor.

It compiles its modules with nvcc where no prebuilt ones are installed (flashinfer-jit-cache), which takes minutes. So
what is not built is absent here; `build` builds it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..presence import Found, Presence, find_library, required
from .base import FP8_TENSOR_CORES, HOPPER, Adapter, Problem

GENERATORS = {"fp8_block": "gen_fp8_blockscale_gemm_sm90_module", "fp8_tensor": "gen_gemm_module"}
"""Of `flashinfer.jit.gemm`: what describes the module that a recipe runs in."""


class FlashInfer(Adapter):
    """One implementation for both recipes."""

    library = "flashinfer"
    implementations = ("flashinfer",)

    def presence(self) -> Presence:
        module, presence = self._found()
        if module is None:
            return presence
        missing = [recipe for recipe in GENERATORS if not _is_built(recipe)]
        if len(missing) == len(GENERATORS):
            return Presence(self.library, None, f"{presence.version} is here, but its FP8 GEMMs are not built")
        if missing:
            return Presence(self.library, f"{presence.version} (not built: {', '.join(missing)})")
        return presence

    def takes(self, implementation: str, problem: Problem) -> bool:
        if problem.out_dtype != torch.bfloat16 or problem.recipe not in GENERATORS:
            return False
        if problem.recipe == "fp8_block":
            fits = problem.capability == HOPPER and problem.n % 64 == 0 and problem.k % 128 == 0
        else:
            fits = problem.capability >= FP8_TENSOR_CORES and problem.n % 16 == 0 and problem.k % 16 == 0
        return fits and _is_built(problem.recipe)

    def run(
        self,
        implementation: str,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        assert scale is not None and weight_scale is not None
        gemm = required(find_library(self.library, "flashinfer.gemm", ("flashinfer-python",)))
        if scale.ndim == 0:
            return gemm.bmm_fp8(x[None], weight.T[None], scale, weight_scale, out_dtype, backend="cublas")[0]
        return gemm.fp8_blockscale_gemm_sm90(
            x, weight, _column_major(scale), weight_scale.contiguous(), out_dtype=out_dtype
        )

    def build(self) -> None:
        """Build what is not built yet; minutes each.

        Raises:
            RuntimeError: FlashInfer is absent, or there is no compiler.
        """
        required(self._found())
        for recipe in GENERATORS:
            if not _is_built(recipe):
                _specification(recipe).build_and_load()
        _is_built.cache_clear()

    def _found(self) -> Found:
        return find_library(self.library, "flashinfer", ("flashinfer-python",))


@functools.cache
def _is_built(recipe: str) -> bool:
    try:
        return bool(_specification(recipe).is_compiled)
    except Exception:  # it is absent, or of another version
        return False


def _specification(recipe: str) -> Any:
    jit = required(find_library(FlashInfer.library, "flashinfer.jit.gemm", ("flashinfer-python",)))
    return getattr(jit, GENERATORS[recipe])()


def _column_major(scale: Tensor) -> Tensor:
    """Scales [M, K / 128] with their rows padded to four: the library reads them by their address alone."""
    rows, blocks = scale.shape
    padded = -(-rows // 4) * 4
    if scale.stride() == (1, padded) or (blocks == 1 and scale.stride(0) == 1):
        return scale
    return scale.new_zeros(blocks, padded).T[:rows].copy_(scale)
