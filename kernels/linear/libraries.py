"""Dense GEMMs of the recipes by libraries: cuBLASLt through torch, and DeepGEMM where it is installed."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from .presence import Found, Presence, find_library, required


def torch_linear(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    """cuBLASLt's GEMM on a CUDA device; operands as in `implementations.linear`.

    Args:
        fast_accumulation: with scales a row or a tensor, leave whole sums in the tensor cores' accumulators, which keep
            about 14 bits, instead of adding slices of them in float32.
    """
    if scale is None or weight_scale is None:
        return torch.mm(x, weight.T) if out_dtype == x.dtype else torch.mm(x, weight.T, out_dtype=out_dtype)
    if scale.ndim == 0:
        return torch._scaled_mm(x, weight.T, scale, weight_scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation)
    if scale.ndim == 1:
        return torch._scaled_mm(
            x, weight.T, scale[:, None], weight_scale[None, :], out_dtype=out_dtype, use_fast_accum=fast_accumulation
        )
    if scale.stride() != (1, len(x)):
        scale = scale.T.contiguous().T
    # Not torch._scaled_mm: it takes unpadded scales of the weight only, which cuBLAS reads with a padded stride.
    return F.scaled_mm(
        x,
        weight.T,
        scale,
        F.ScalingType.BlockWise1x128,
        _whole_padded_rows(weight_scale),
        F.ScalingType.BlockWise128x128,
        F.SwizzleType.NO_SWIZZLE,
        F.SwizzleType.NO_SWIZZLE,
        output_dtype=out_dtype,
    )


def pad_rows_of_scales(weight_scale: Tensor) -> Tensor:
    """The same scales [N blocks, K blocks] in rows padded to a multiple of four, 16 bytes, as cuBLAS reads them."""
    blocks = weight_scale.shape[1]
    width = -(-blocks // 4) * 4
    if weight_scale.stride() == (width, 1):
        return weight_scale
    return F.pad(weight_scale, (0, width - blocks))[:, :blocks]


def _whole_padded_rows(weight_scale: Tensor) -> Tensor:
    """Column-major [K blocks padded to a multiple of four, N blocks]."""
    padded = pad_rows_of_scales(weight_scale)
    return padded.as_strided((padded.shape[0], padded.stride(0)), (padded.stride(0), 1)).T


def deep_gemm_linear(
    x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """DeepGEMM's bf16 or 1 x 128 by 128 x 128 GEMM; it reads the scales of x in place from `allocate_scales`."""
    library = required(_find_deep_gemm())
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    if scale is None or weight_scale is None:
        library.bf16_gemm_nt(x, weight, out)
    else:
        library.fp8_gemm_nt((x, scale), (weight, weight_scale.contiguous()), out)
    return out


def deep_gemm() -> ModuleType | None:
    """The module, or None; a broken installation is logged."""
    return _find_deep_gemm()[0]


def deep_gemm_presence() -> Presence:
    """Its version where it imports, whichever distribution it comes from, or why it does not."""
    return _find_deep_gemm()[1]


def _find_deep_gemm() -> Found:
    return find_library("deep_gemm", "deep_gemm", ("deep-gemm", "sgl-deep-gemm"))
