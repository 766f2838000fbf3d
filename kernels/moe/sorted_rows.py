"""The kernels of `triton_rows.py` as functions: gathering of sorted rows, SwiGLU, the groups that libraries take."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, allocate_scales
from .reference import SortedRows
from .triton_rows import gather_kernel, group_ends_kernel, row_experts_kernel, sorted_swiglu_kernel

ROWS, WARPS = 4, 4  # of a program; ROWS divides every block


def gather_rows(x: Tensor, scale: Tensor | None, rows: SortedRows) -> tuple[Tensor, Tensor | None]:
    """The tokens' rows in sorted order, undefined in padding: ([padded rows, K], their scales or None).

    Args:
        x: contiguous [tokens, K], bfloat16, or E4M3 with float32 `scale` [tokens] or [tokens, ceil(K / 128)] of any
            strides. Block scales come out column-major, see `allocate_scales`.
    """
    count, width = len(rows.tokens), x.shape[1]
    scales = NO_SCALES if scale is None else ROW_SCALES if scale.ndim == 1 else BLOCK_SCALES
    out, out_scale = x.new_empty(count, width), allocate_scales(count, width, scales, x.device)
    if count:
        gather_kernel[(count // ROWS,)](
            x,
            scale,
            scale.stride(0) if scale is not None else 0,
            scale.stride(1) if scale is not None and scale.ndim == 2 else 0,
            rows.tokens,
            rows.expert_of_block,
            out,
            out_scale,
            out_scale.stride(0),
            out_scale.stride(1) if scales == BLOCK_SCALES else 0,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            BLOCK_M=rows.block_m,
            ROWS=ROWS,
            SCALES=scales,
            num_warps=WARPS,
        )
    return out, None if scale is None else out_scale


def sorted_swiglu(gate_up: Tensor, rows: SortedRows, quantize: bool) -> tuple[Tensor, Tensor | None]:
    """silu(gate) * up of sorted rows, as `experts.gate_up_swiglu` returns it.

    Args:
        gate_up: contiguous bfloat16 [padded rows, 2 * width], gate first.
    """
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    scales = BLOCK_SCALES if quantize else NO_SCALES
    out = gate_up.new_empty(count, width, dtype=torch.float8_e4m3fn if quantize else torch.bfloat16)
    scale = allocate_scales(count, width, scales, gate_up.device)
    if count:
        sorted_swiglu_kernel[(count // ROWS,)](
            gate_up,
            rows.tokens,
            rows.expert_of_block,
            out,
            scale,
            scale.stride(0),
            scale.stride(1) if quantize else 0,
            WIDTH=width,
            BLOCKS=triton.next_power_of_2(triton.cdiv(width, 128)),
            BLOCK_M=rows.block_m,
            ROWS=ROWS,
            SCALES=scales,
            num_warps=WARPS,
        )
    return out, scale if quantize else None


def group_ends(rows: SortedRows, experts: int) -> Tensor:
    """Int32 [experts]: the row after each expert's last; of an expert without rows, where its rows would start."""
    ends = rows.tokens.new_empty(experts)
    if len(rows.tokens):
        blocks = len(rows.expert_of_block)
        arguments = rows.tokens, rows.expert_of_block, ends, blocks
        group_ends_kernel[(experts,)](*arguments, BLOCK_M=rows.block_m, STEP=256, num_warps=4)
    return ends


def row_experts(rows: SortedRows) -> Tensor:
    """Int32 [padded rows]: the expert of each row, -1 in padding."""
    experts = torch.empty_like(rows.tokens)
    if len(rows.tokens):
        arguments = rows.tokens, rows.expert_of_block, experts
        row_experts_kernel[(len(rows.expert_of_block),)](*arguments, BLOCK_M=rows.block_m, num_warps=4)
    return experts
