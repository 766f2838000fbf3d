"""What the fused residual addition, norm and quantization compute, one operation after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3

NORM_BLOCK = 256
"""Channels that a BlockNorm normalises together (LoKA, arXiv 2605.10886)."""


def residual_norm(x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm), both rounded to bfloat16; the norm reads the rounded sum.

    Args:
        x, residual: bfloat16 [rows, width]; a residual of None adds nothing.
        gain: [width] of an RMSNorm; None is a BlockNorm, RMS over blocks of 256 (the last: what remains), no gain.
    """
    total = x if residual is None else (x.float() + residual.float()).bfloat16()
    if gain is None:
        blocks = total.float().split(NORM_BLOCK, dim=-1)
        return total, torch.cat([F.rms_norm(block, block.shape[-1:], None, eps) for block in blocks], -1).bfloat16()
    normed = F.rms_norm(total.float(), gain.shape, gain.float(), eps)
    return total, normed.bfloat16()


def residual_norm_quantize(
    x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float, block_scales: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, E4M3 codes of its norm, scales): scales [rows], or [rows, ceil(width / 128)] by block.

    The norm is rounded to bfloat16 before it is quantized, as if it had been stored in between.
    """
    total, normed = residual_norm(x, residual, gain, eps)
    codes, scale = (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(normed)
    return total, codes, scale


def residual_norm_both(
    x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float, block_scales: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + residual, its norm in bfloat16, E4M3 codes of that norm, scales), see the two functions above."""
    total, normed = residual_norm(x, residual, gain, eps)
    codes, scale = (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(normed)
    return total, normed, codes, scale
