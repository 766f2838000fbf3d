"""One program a row: gate, multiply, quantize."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, allocate_scales, store_quantized


@triton.jit
def swiglu_kernel(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    scale_row_stride,
    scale_block_stride,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two, at least ceil(WIDTH / 128)
    SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    gate_at = row * 2 * WIDTH + column
    gate = tl.load(gate_up_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16)
    at = row * WIDTH + column
    store_quantized(
        activated, at, inside, block, row, out_ptr, scale_ptr, scale_row_stride, scale_block_stride, WIDTH, SCALES
    )


def swiglu(gate_up: Tensor) -> Tensor:
    """As `reference.swiglu`; gate_up contiguous."""
    return _launch(gate_up, NO_SCALES)[0]


def swiglu_quantize(gate_up: Tensor, block_scales: bool) -> tuple[Tensor, Tensor]:
    """As `reference.swiglu_quantize`; block scales are column-major, see `allocate_scales`."""
    return _launch(gate_up, BLOCK_SCALES if block_scales else ROW_SCALES)


def _launch(gate_up: Tensor, scales: int) -> tuple[Tensor, Tensor]:
    rows, doubled = gate_up.shape
    if gate_up.dtype != torch.bfloat16 or not gate_up.is_contiguous() or doubled % 2:
        raise ValueError(
            f"gate_up: expected contiguous bfloat16 [rows, 2 * width], got {gate_up.dtype} {[rows, doubled]}"
        )
    width = doubled // 2
    out = gate_up.new_empty(rows, width, dtype=torch.float8_e4m3fn if scales else torch.bfloat16)
    scale = allocate_scales(rows, width, scales, gate_up.device)
    if rows:
        swiglu_kernel[(rows,)](
            gate_up,
            out,
            scale,
            scale.stride(0),
            scale.stride(1) if scales == BLOCK_SCALES else 0,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            SCALES=scales,
            num_warps=4 if width <= 2048 else 8,
        )
    return out, scale
