"""Our own kernel in Triton, one implementation for each tiling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..presence import Found, Presence, find_library
from ..tilings import Tiling
from .base import FP8_TENSOR_CORES, Adapter, Problem


class Triton(Adapter):
    """Computes any shape in bf16, fp8_row and fp8_block; a tiling is tried at the rows that it is meant for."""

    library = "triton"

    def __init__(self, tilings: Mapping[str, Tiling]) -> None:
        self._tilings = tilings
        self.implementations = tuple(tilings)

    def presence(self) -> Presence:
        return self._found()[1]

    def takes(self, implementation: str, problem: Problem) -> bool:
        if problem.recipe == "fp8_tensor" or self._found()[0] is None:
            return False
        low, high = self._tilings[implementation].rows
        needed = (8, 0) if problem.recipe == "bf16" else FP8_TENSOR_CORES
        return low <= problem.rows <= high and problem.capability >= needed

    def run(
        self,
        implementation: str,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        from ..triton import triton_linear

        return triton_linear(x, scale, weight, weight_scale, self._tilings[implementation], out_dtype)

    def _found(self) -> Found:
        return find_library(self.library, "triton", ("triton",))
