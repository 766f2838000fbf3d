"""What the fused residual addition, RMSNorm and quantization compute, one operation after another."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3


def residual_norm(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMSNorm), both rounded to bfloat16; the norm reads the rounded sum.

    Args:
        x, residual: bfloat16 [rows, width]; a residual of None adds nothing.
        gain: [width].
    """
    total = x if residual is None else (x.float() + residual.float()).bfloat16()
    normed = F.rms_norm(total.float(), gain.shape, gain.float(), eps)
    return total, normed.bfloat16()


def residual_norm_quantize(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, block_scales: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, E4M3 codes of its RMSNorm, scales): scales [rows], or [rows, ceil(width / 128)] by block.

    The norm is rounded to bfloat16 before it is quantized, as if it had been stored in between.
    """
    total, normed = residual_norm(x, residual, gain, eps)
    codes, scale = (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(normed)
    return total, codes, scale


def residual_norm_both(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, block_scales: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + residual, its RMSNorm in bfloat16, E4M3 codes of that norm, scales), see the two functions above."""
    total, normed = residual_norm(x, residual, gain, eps)
    codes, scale = (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(normed)
    return total, normed, codes, scale
