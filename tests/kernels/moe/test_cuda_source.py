"""The grouped GEMM in CUDA C++ compiles for Hopper at the 4B-A0.5B preset's sizes; running it is left to tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.cuda_sources import check_asynchronous, compile_with_nvcc, needs_nvcc
from tests.kernels.devices import needs_triton

pytestmark = needs_triton


@needs_nvcc
@pytest.mark.parametrize("swiglu", [True, False])
@pytest.mark.parametrize(("d_model", "width"), [(1408, 1408), (256, 128)])
def test_compiles_for_hopper(d_model: int, width: int, swiglu: bool, tmp_path: Path) -> None:
    from loka_serve.kernels.moe.cuda import SOURCE, definitions

    inner, channels = (d_model, 2 * width) if swiglu else (width, d_model)
    report = compile_with_nvcc(SOURCE, definitions(inner, channels, swiglu, group_m=2), tmp_path)
    check_asynchronous(report, spilled_bytes=256)  # addresses of the epilogue, once a tile


def test_takes_no_weights_off_hopper() -> None:
    from loka_serve.kernels.moe.cuda import warp_specialized_takes

    weight = torch.zeros(2, 256, 128, dtype=torch.float8_e4m3fn)
    assert not warp_specialized_takes(weight, torch.ones(2, 2, 1))


def test_refuses_what_it_does_not_run() -> None:
    from loka_serve.kernels.moe.cuda import WarpSpecialized
    from loka_serve.kernels.moe.experts import expert_linear, gate_up_swiglu

    x, weight = torch.zeros(4, 128).bfloat16(), torch.zeros(1, 256, 128).bfloat16()
    with pytest.raises(ValueError, match="sorted rows and block scales"):
        expert_linear(x, None, weight, None, None, WarpSpecialized())
    with pytest.raises(ValueError, match="quantize = False"):
        gate_up_swiglu(x, None, weight, None, None, WarpSpecialized(), quantize=False)
