"""Measures what the floor divides by: large GEMMs and a copy, on this GPU and in this run."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.floor import Ceilings
from benchmarks.kernels import copy_bandwidth

SIZE = 8192


def measure_ceilings() -> Ceilings:
    """BF16 and FP8 (one scale a tensor, fast accumulation) products of 8192^3, and one pass over 1 GiB."""
    from loka_serve.kernels.benchmarking import time_us

    def tflops(product: Tensor, weight: Tensor, fp8: bool) -> float:
        scale = torch.ones((), device="cuda")

        def multiply() -> Tensor:
            if not fp8:
                return product @ weight.t()
            return torch._scaled_mm(product, weight.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)

        return 2 * SIZE**3 / time_us(multiply, [()] * 2) / 1e6

    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = tflops(left, right, False)
    fp8 = tflops(left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn), True)
    return Ceilings(round(bf16, 1), round(fp8, 1), round(copy_bandwidth(), 1))
