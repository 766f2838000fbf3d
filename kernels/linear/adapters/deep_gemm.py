"""DeepGEMM: BF16 and block scales on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from ..libraries import deep_gemm, deep_gemm_linear, deep_gemm_presence
from ..presence import Presence
from .base import HOPPER, Adapter, Problem


class DeepGemm(Adapter):
    """TMA and its tiles want widths of whole lines; scales a row it does not have."""

    library = "deep_gemm"
    implementations = ("deep_gemm",)

    def presence(self) -> Presence:
        return deep_gemm_presence()

    def takes(self, implementation: str, problem: Problem) -> bool:
        if problem.recipe not in ("bf16", "fp8_block") or problem.capability != HOPPER:
            return False
        if problem.recipe == "fp8_block" and problem.out_dtype != torch.bfloat16:
            return False
        wide = problem.n % 64 == 0 and problem.k % (64 if problem.recipe == "bf16" else 128) == 0
        return wide and deep_gemm() is not None

    def run(
        self,
        implementation: str,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        return deep_gemm_linear(x, scale, weight, weight_scale, out_dtype)
