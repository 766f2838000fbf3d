"""The two grouped GEMMs of the block as functions: checks, outputs and launches of the kernel in `triton.py`.

With a `WarpSpecialized` in the place of a `Tiling` they run in a kernel in CUDA C++, see `cuda.py`; with a `DeepGemm`
in that library, see `libraries.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, allocate_scales
from .cuda import WarpSpecialized, warp_specialized_linear
from .libraries import DeepGemm, deep_gemm_linear, deep_gemm_swiglu
from .reference import SortedRows
from .sorted_rows import gather_rows
from .triton import grouped_linear_kernel


@dataclass(frozen=True)
class Tiling:
    """How one GEMM runs.

    Attributes:
        block_m: rows of a program; from 64 rows the tensor cores' fastest instructions apply.
        warps, stages: of a program, and of its pipeline of loads.
        paired: whether a program without SwiGLU computes two neighbouring tiles of 128 columns.
        persistent: so many programs on a multiprocessor compute all tiles in turn; 0: a program for each tile.
        described: weights, and rows that lie in place, are loaded through tensor descriptors (TMA) and not by threads.
        wide: one product of 256 columns, without SwiGLU. Block scales need two float32 sums, for which it is too large.
        ordered: the rows of the first GEMM are brought in order before, not gathered by each program.
        group_m: blocks of rows that pass over the weights together, so that a weight tile is read once into L2.
    """

    block_m: int
    warps: int
    stages: int
    paired: bool = False
    persistent: int = 0
    described: bool = False
    wide: bool = False
    ordered: bool = False
    group_m: int = 8


Implementation = Tiling | WarpSpecialized | DeepGemm


def gate_up_swiglu(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: SortedRows | None,
    tiling: Implementation,
    quantize: bool,
) -> tuple[Tensor, Tensor | None]:
    """silu(gate) * up of each sorted row, rounded once: (bfloat16, None) or, to `quantize`, (E4M3, 1 x 128 scales).

    Args:
        x: [tokens, K], bfloat16, or E4M3 with float32 `scale` [tokens] or [tokens, ceil(K / 128)] of any strides.
        weight: [experts, 2 * width, K] of the type of x, gate first; `weight_scale` as in `ExpertWeights`.
        rows: None to compute one expert on every token in place, which is a dense gated linear.

    Returns:
        [padded rows, width], undefined in padding; the scales are column-major, see `allocate_scales`.
    """
    if isinstance(tiling, DeepGemm):
        assert rows is not None
        _check(x, scale, weight, weight_scale, rows, tiling.block_m)
        return deep_gemm_swiglu(x, scale, weight, weight_scale, rows, tiling, quantize)
    if isinstance(tiling, WarpSpecialized):
        if not quantize:
            raise ValueError(f"{tiling}: it quantizes the activated values, got quantize = False")
        return _launch_specialized(x, scale, weight, weight_scale, rows, tiling, swiglu=True)
    return _launch(x, scale, weight, weight_scale, rows, tiling, swiglu=True, quantize=quantize)


def expert_linear(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: SortedRows | None,
    tiling: Implementation,
) -> Tensor:
    """Each sorted row times its expert's weight: bfloat16 [padded rows, N], undefined in padding.

    Args:
        x: [padded rows, K] with its scale, otherwise as in `gate_up_swiglu`; a dense linear where `rows` is None.
        weight: [experts, N, K].
    """
    if isinstance(tiling, DeepGemm):
        assert rows is not None
        _check(x, scale, weight, weight_scale, rows, tiling.block_m)
        return deep_gemm_linear(x, scale, weight, weight_scale, rows, tiling)
    if isinstance(tiling, WarpSpecialized):
        return _launch_specialized(x, scale, weight, weight_scale, rows, tiling, swiglu=False)[0]
    return _launch(x, scale, weight, weight_scale, rows, tiling, swiglu=False, quantize=False)[0]


def _launch_specialized(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: SortedRows | None,
    tiling: WarpSpecialized,
    swiglu: bool,
) -> tuple[Tensor, Tensor | None]:
    scales = _check(x, scale, weight, weight_scale, rows, tiling.block_m)
    if rows is None or scales != BLOCK_SCALES or scale is None or weight_scale is None:
        raise ValueError(f"{tiling}: expected sorted rows and block scales")
    return warp_specialized_linear(x, scale, weight, weight_scale, rows, tiling, swiglu)


def _launch(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: SortedRows | None,
    tiling: Tiling,
    swiglu: bool,
    quantize: bool,
) -> tuple[Tensor, Tensor | None]:
    experts, channels, inner = weight.shape
    scales = _check(x, scale, weight, weight_scale, rows, tiling.block_m)
    if rows is None:
        blocks = triton.cdiv(x.shape[0], tiling.block_m)
        out_rows = x.shape[0]
    else:
        blocks = len(rows.expert_of_block)
        out_rows = blocks * tiling.block_m
    if rows is not None and not swiglu and x.shape[0] != out_rows:
        raise ValueError(f"x: expected {out_rows} sorted rows, got {x.shape[0]}")
    ordered = tiling.ordered and swiglu and rows is not None
    if ordered:
        assert rows is not None
        x, scale = gather_rows(x, scale, rows)
    gather = swiglu and rows is not None and not ordered
    width = channels // 2 if swiglu else channels
    out = x.new_empty(out_rows, width, dtype=torch.float8_e4m3fn if quantize else torch.bfloat16)
    out_scale = allocate_scales(out_rows, width, BLOCK_SCALES if quantize else NO_SCALES, x.device)
    if blocks:
        paired, lanes = tiling.paired and not swiglu, 256 if tiling.wide and not swiglu else 128
        programs = blocks * triton.cdiv(width, 256 if paired else lanes)
        block_k = 128 if scales else 64
        described_x = tiling.described and not gather
        if tiling.persistent:
            programs = min(programs, tiling.persistent * _multiprocessors(x.device))
        grouped_linear_kernel[(programs,)](
            _describe(x, tiling.block_m, block_k) if described_x else x,
            scale,
            scale.stride(0) if scale is not None else 0,
            scale.stride(1) if scale is not None and scale.ndim == 2 else 0,
            _describe(weight.view(experts * channels, inner), lanes, block_k) if tiling.described else weight,
            weight_scale,
            None if rows is None else rows.tokens,
            None if rows is None else rows.expert_of_block,
            None if rows is None else rows.block_count,
            out,
            out_scale,
            out_scale.stride(0),
            out_scale.stride(1) if quantize else 0,
            x.shape[0],
            blocks,
            programs,
            N=channels,
            K=inner,
            BLOCK_M=tiling.block_m,
            BLOCK_K=block_k,
            GROUP_M=tiling.group_m,
            PERSISTENT=tiling.persistent > 0,
            GROUPED=rows is not None,
            GATHER=gather,
            SWIGLU=swiglu,
            PAIRED=paired,
            LANES=lanes,
            X_DESCRIBED=described_x,
            W_DESCRIBED=tiling.described,
            SCALES=scales,
            OUT_SCALES=BLOCK_SCALES if quantize else NO_SCALES,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return out, out_scale if quantize else None


def _describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    if matrix.shape[1] * matrix.element_size() % 16:
        raise ValueError(f"tiling: rows of {matrix.shape[1]} x {matrix.dtype} cannot be described, 16 bytes must fit")
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _check(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: SortedRows | None,
    block_m: int,
) -> int:
    """Which scales the operands carry; ValueError where they do not fit together."""
    experts, channels, inner = weight.shape
    dtype = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    if x.dtype != dtype or x.shape[1:] != (inner,) or not x.is_contiguous():
        raise ValueError(f"x: expected contiguous {dtype} [rows, {inner}], got {x.dtype} {list(x.shape)}")
    if weight.dtype != dtype or not weight.is_contiguous():
        raise ValueError(f"weight: expected contiguous {dtype} [experts, N, K], got {weight.dtype}")
    if rows is None and experts != 1:
        raise ValueError(f"weight: expected one expert for rows in place, got {experts}")
    if rows is not None and rows.block_m != block_m:
        raise ValueError(f"tiling: block_m {block_m}, but the rows were sorted in blocks of {rows.block_m}")
    if scale is None:
        expected: tuple[list[int] | None, list[int] | None] = (None, None)
    elif scale.ndim == 1:
        expected = [x.shape[0]], [experts, channels]
    else:
        expected = [x.shape[0], triton.cdiv(inner, 128)], [experts, triton.cdiv(channels, 128), triton.cdiv(inner, 128)]
    found = tuple(None if given is None else list(given.shape) for given in (scale, weight_scale))
    if found != expected or not (weight_scale is None or weight_scale.is_contiguous()):
        raise ValueError(f"scale, weight_scale: expected shapes {expected}, contiguous for the weight, got {found}")
    if scale is None:
        return NO_SCALES
    return ROW_SCALES if scale.ndim == 1 else BLOCK_SCALES


def _multiprocessors(device: torch.device) -> int:
    # Without a GPU, the interpreter runs programs one after another: two, so that each computes several tiles.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
