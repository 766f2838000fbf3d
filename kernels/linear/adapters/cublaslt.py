"""cuBLASLt through torch: BF16, and FP8 with scales a row, a block or a tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..libraries import pad_rows_of_scales, torch_linear
from ..presence import Presence
from .base import FP8_TENSOR_CORES, HOPPER, Adapter, Problem


class CublasLt(Adapter):
    """`torch`, and for scales a row or a tensor `torch_fast`, which leaves whole sums in the tensor cores."""

    library = "cublaslt"
    implementations = ("torch", "torch_fast")

    def presence(self) -> Presence:
        cuda = torch.version.cuda
        if cuda is None:
            return Presence(self.library, None, f"torch {torch.__version__} is built without CUDA")
        return Presence(self.library, f"CUDA {cuda}, torch {torch.__version__}")

    def takes(self, implementation: str, problem: Problem) -> bool:
        if problem.recipe == "bf16":
            return implementation == "torch"
        if problem.n % 16 or problem.k % 16 or problem.capability < FP8_TENSOR_CORES:
            return False
        if problem.recipe != "fp8_block":
            return True
        # cuBLAS 12.9 on Hopper alone; scales of x are read in place only where their padding to four rows adds nothing.
        served = problem.capability == HOPPER and cuda_version() >= (12, 9)
        return implementation == "torch" and served and problem.rows % 4 == 0

    def run(
        self,
        implementation: str,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        return torch_linear(x, scale, weight, weight_scale, out_dtype, implementation == "torch_fast")

    def weight_scale(self, weight_scale: Tensor) -> Tensor:
        return pad_rows_of_scales(weight_scale)


@functools.cache
def cuda_version() -> tuple[int, ...]:
    """Of torch's CUDA libraries; (0,) without."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))
