"""torchao's float8 inference: its own call of torch's scaled GEMM, with scales a row or a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..presence import Found, Presence, find_library, required
from .base import FP8_TENSOR_CORES, Adapter, Problem


class TorchAo(Adapter):
    """`torchao` adds slices of the sums in float32, `torchao_fast` leaves them in the tensor cores."""

    library = "torchao"
    implementations = ("torchao", "torchao_fast")

    def presence(self) -> Presence:
        return self._found()[1]

    def takes(self, implementation: str, problem: Problem) -> bool:
        return (
            problem.recipe in ("fp8_row", "fp8_tensor")
            and problem.capability >= FP8_TENSOR_CORES
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
        assert scale is not None and weight_scale is not None
        multiply = required(self._found()).addmm_float8_unwrapped_inference
        return multiply(
            x,
            scale.reshape(-1, 1),
            weight.T,
            weight_scale.reshape(1, -1),
            out_dtype,
            use_fast_accum=implementation == "torchao_fast",
        )

    def _found(self) -> Found:
        return find_library(self.library, "torchao.float8.inference", ("torchao",))
