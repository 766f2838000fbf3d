"""FBGEMM's generative-AI operators: CUTLASS FP8 GEMMs with scales a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..presence import Found, Presence, find_library, required
from .base import HOPPER, Adapter, Problem

DISTRIBUTIONS = ("fbgemm-gpu-genai", "fbgemm-gpu", "fbgemm-gpu-nightly")


class Fbgemm(Adapter):
    """`fbgemm` adds slices of the sums in float32, `fbgemm_fast` leaves them in the tensor cores."""

    library = "fbgemm"
    implementations = ("fbgemm", "fbgemm_fast")

    def presence(self) -> Presence:
        return self._found()[1]

    def takes(self, implementation: str, problem: Problem) -> bool:
        return (
            problem.recipe == "fp8_row"
            and problem.out_dtype == torch.bfloat16
            and problem.capability == HOPPER
            and problem.n % 16 == 0
            and problem.k % 16 == 0
            and self._found()[0] is not None
        )

    def run(
        self,
        implementation: str,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        required(self._found())  # the import registers the operators
        return torch.ops.fbgemm.f8f8bf16_rowwise(
            x, weight, scale, weight_scale, use_fast_accum=implementation == "fbgemm_fast"
        )

    def _found(self) -> Found:
        return find_library(self.library, "fbgemm_gpu.experimental.gen_ai", DISTRIBUTIONS)
