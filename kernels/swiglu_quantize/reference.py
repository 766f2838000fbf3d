"""What the fused SwiGLU and quantization compute, one operation after another."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3

ACTIVATIONS = ("silu", "hard_swish")


def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up in float32, rounded to bfloat16; gate_up bfloat16 [rows, 2 * width], the gate first.

    `hard_swish` is x * relu6(x + 3) / 6 (arXiv 1905.02244).
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ((F.hardswish(gate) if activation == "hard_swish" else F.silu(gate)) * up).bfloat16()


def swiglu_quantize(gate_up: Tensor, block_scales: bool, activation: str = "silu") -> tuple[Tensor, Tensor]:
    """(E4M3 codes of the SwiGLU [rows, width], scales): scales [rows], or [rows, ceil(width / 128)] by block."""
    return (quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3)(swiglu(gate_up, activation))
