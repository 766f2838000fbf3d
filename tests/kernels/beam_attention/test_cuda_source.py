"""Beam attention in CUDA C++ compiles for Hopper; running it is left to tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.cuda_sources import check_asynchronous, compile_with_nvcc, needs_nvcc
from tests.kernels.devices import needs_triton

pytestmark = needs_triton


@needs_nvcc
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("groups", "heads_per_group"), [(11, 1), (4, 3)])
def test_compiles_for_hopper(groups: int, heads_per_group: int, split: bool, tmp_path: Path) -> None:
    from loka_serve.kernels.beam_attention.configurations import WarpSpecialized
    from loka_serve.kernels.beam_attention.cuda import SOURCE, definitions

    report = compile_with_nvcc(SOURCE, definitions(groups, heads_per_group, WarpSpecialized(split)), tmp_path)
    check_asynchronous(report, spilled_bytes=256)  # addresses of queries and results, once a tile


def test_many_tiles_go_to_the_kernel() -> None:
    from loka_serve.kernels.beam_attention.configurations import WHOLE_TILES, WarpSpecialized, choose_fp8

    assert choose_fp8(512, 32 * 11, 3072, 132) == WarpSpecialized(split=True)
    assert choose_fp8(512, 8 * 11, 3072, 132) == WHOLE_TILES
    assert choose_fp8(512, 32 * 11, 512, 132) == WHOLE_TILES
