"""The grouped GEMM compiled for sm_90: every configuration of the tables, and each kind of candidate."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.devices import compile_for_hopper, needs_triton

pytestmark = needs_triton


def configuration_of(tiling: Any, fp8: bool, swiglu: bool) -> dict[str, Any]:
    """What the launch in `experts.py` gives the kernel, at the 4B-A0.5B preset's sizes."""
    element, block_k, scales = ("fp8e4nv", 128, 2) if fp8 else ("bf16", 64, 0)
    lanes = 256 if tiling.wide and not swiglu else 128
    gather = swiglu and not tiling.ordered
    described_x = tiling.described and not gather
    return {
        "x": f"tensordesc<{element}[{tiling.block_m}, {block_k}]>" if described_x else f"*{element}",
        "weight": f"tensordesc<{element}[{lanes}, {block_k}]>" if tiling.described else f"*{element}",
        "out_ptr": f"*{element}" if swiglu else "*bf16",
        "N": 2816 if swiglu else 1408,
        "K": 1408,
        "BLOCK_M": tiling.block_m,
        "BLOCK_K": block_k,
        "GROUP_M": tiling.group_m,
        "PERSISTENT": tiling.persistent > 0,
        "GROUPED": True,
        "GATHER": gather,
        "SWIGLU": swiglu,
        "PAIRED": tiling.paired and not swiglu,
        "LANES": lanes,
        "X_DESCRIBED": described_x,
        "W_DESCRIBED": tiling.described,
        "SCALES": scales,
        "OUT_SCALES": scales * swiglu,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


SIGNATURE = {
    **dict.fromkeys(("x_scale_ptr", "weight_scale_ptr", "out_scale_ptr"), "*fp32"),
    **dict.fromkeys(("row_token_ptr", "expert_of_block_ptr", "block_count_ptr"), "*i32"),
    **{f"{name}_{axis}_stride": "i32" for name in ("x_scale", "out_scale") for axis in ("row", "block")},
    **dict.fromkeys(("rows", "blocks", "programs"), "i32"),
}


def compile_all(fp8: bool, tilings: list[tuple[Any, bool]]) -> None:
    """Each (tiling, whether with SwiGLU) once."""
    from loka_serve.kernels.moe.triton import grouped_linear_kernel

    for least_rows, instruction in ((64, "wgmma"), (0, "mma.sync")):
        configurations = [
            configuration_of(tiling, fp8, swiglu)
            for tiling, swiglu in dict.fromkeys(tilings)
            if (tiling.block_m >= 64) == (least_rows == 64)
        ]
        if configurations:
            compile_for_hopper(grouped_linear_kernel, SIGNATURE, configurations, instruction=instruction)


@pytest.mark.parametrize("fp8", [False, True])
def test_every_tabled_configuration_compiles_for_hopper(fp8: bool) -> None:
    from loka_serve.kernels.moe.configurations import BF16_CONFIGURATIONS, FP8_CONFIGURATIONS
    from loka_serve.kernels.moe.experts import Tiling

    uses = [
        (use, swiglu)
        for _, both in (FP8_CONFIGURATIONS if fp8 else BF16_CONFIGURATIONS)
        for use, swiglu in ((both.gate_up, True), (both.down, False))
        if isinstance(use, Tiling)
    ]
    compile_all(fp8, uses)


@pytest.mark.parametrize("fp8", [False, True])
def test_descriptors_compile_for_hopper(fp8: bool) -> None:
    from loka_serve.kernels.moe.experts import Tiling

    persistent = int(fp8)
    compile_all(
        fp8,
        [
            (Tiling(128, 8, 3, described=True, persistent=persistent), True),
            (Tiling(128, 8, 3, described=True, persistent=1), False),
            (Tiling(128, 8, 3, described=True, persistent=persistent, ordered=True), True),
            (Tiling(64, 8, 4, described=True), True),
            (Tiling(64, 8, 4, described=True, wide=True), False),
            (Tiling(16, 4, 3, described=True), True),
        ],
    )
