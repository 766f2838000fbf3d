"""Some rows a program: gate, multiply, quantize."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.tilings import RowTiling, row_tiling
from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, allocate_scales, store_quantized_rows
from .reference import ACTIVATIONS


@triton.jit(do_not_specialize=["rows", "scale_block_stride"])
def swiglu_kernel(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    rows,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    ROWS: tl.constexpr,  # of a program
    HARD_SWISH: tl.constexpr,  # gate * relu6(gate + 3) / 6 instead of SiLU
    SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    column = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = valid[:, None, None] & (column < WIDTH)[None, :, :]
    gate_at = row[:, None, None] * (2 * WIDTH) + column[None, :, :]
    gate = tl.load(gate_up_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if HARD_SWISH:
        # Comparisons instead of minimum and maximum: a NaN gate falls through to NaN * 0.
        opened = tl.where(gate > -3.0, tl.where(gate < 3.0, gate + 3.0, 6.0), 0.0) * (1.0 / 6.0)
        activated = (gate * opened * up).to(tl.bfloat16)
    else:
        activated = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16)
    store_quantized_rows(activated, row, valid, out_ptr, scale_ptr, scale_row_stride, scale_block_stride, WIDTH, SCALES)


def swiglu(gate_up: Tensor, tiling: RowTiling | None = None, activation: str = "silu") -> Tensor:
    """As `reference.swiglu`; gate_up contiguous."""
    return _launch(gate_up, NO_SCALES, tiling, activation)[0]


def swiglu_quantize(
    gate_up: Tensor, block_scales: bool, tiling: RowTiling | None = None, activation: str = "silu"
) -> tuple[Tensor, Tensor]:
    """As `reference.swiglu_quantize`; block scales are column-major, see `allocate_scales`."""
    return _launch(gate_up, BLOCK_SCALES if block_scales else ROW_SCALES, tiling, activation)


def _launch(gate_up: Tensor, scales: int, tiling: RowTiling | None, activation: str) -> tuple[Tensor, Tensor]:
    rows, doubled = gate_up.shape
    if gate_up.dtype != torch.bfloat16 or not gate_up.is_contiguous() or doubled % 2:
        raise ValueError(
            f"gate_up: expected contiguous bfloat16 [rows, 2 * width], got {gate_up.dtype} {[rows, doubled]}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    width = doubled // 2
    out = gate_up.new_empty(rows, width, dtype=torch.float8_e4m3fn if scales else torch.bfloat16)
    scale = allocate_scales(rows, width, scales, gate_up.device)
    tiling = tiling or row_tiling(rows, width)
    if rows:
        swiglu_kernel[(triton.cdiv(rows, tiling.rows),)](
            gate_up,
            out,
            scale,
            scale.stride(0),
            scale.stride(1) if scales == BLOCK_SCALES else 0,
            rows,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            ROWS=tiling.rows,
            HARD_SWISH=activation == "hard_swish",
            SCALES=scales,
            num_warps=tiling.warps,
        )
    return out, scale
