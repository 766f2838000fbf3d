"""Reference rounding to FP8 E4M3 and INT8: the numbers every quantization kernel must reproduce bit for bit.

A scale maps codes back to values (``value = code * scale``) and is ``amax / 448`` for FP8 and ``amax / 127`` for INT8,
where amax is the largest magnitude the scale covers. Dynamic scales multiply by ``448 / amax`` as DeepGEMM and FBGEMM
do (one division a scale, not one a value); static scales divide by the stored scale, as ONNX QuantizeLinear says.

Values outside the numbers:

* NaN stays NaN in E4M3, so it reaches every output that its row touches.
* An infinite value makes its dynamic scale infinite, and ``0 * inf`` makes the outputs of that row NaN: an overflow is
  seen, and only in its own row. Under a static scale it saturates to +-448, as the hardware's ``satfinite`` does.
* INT8 has no NaN code: NaN is stored as 0 with a NaN scale, which has the same effect.
* A group whose amax is below ``AMAX_FLOOR`` (all zeros, for example) takes the scale of ``AMAX_FLOOR``.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
INT8_MAX = 127.0
AMAX_FLOOR = 1e-12
BLOCK = 128
"""Width of fp8_block's groups: 1 x 128 activations, 128 x 128 weights."""


def round_to_e4m3(values: Tensor) -> Tensor:
    """Round float values to E4M3, ties to even, magnitudes beyond 448 (infinities too) to +-448; NaN stays NaN.

    Returns a ``torch.float8_e4m3fn`` tensor of the same shape.
    """
    # The cast itself saturates in some torch versions and gives NaN in others, hence the clamp (which keeps NaN).
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_to_int8(values: Tensor) -> Tensor:
    """Round float values to int8, ties to even, saturating at +-127 (so the range is symmetric); NaN becomes 0."""
    return values.float().round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0).to(torch.int8)


def quantize_rows_e4m3(values: Tensor) -> tuple[Tensor, Tensor]:
    """One dynamic scale for each row: per token for activations, per output channel for weights.

    Args:
        values: float ``[..., K]``.

    Returns:
        E4M3 codes ``[..., K]`` and float32 scales ``[...]``.
    """
    values = values.float()
    amax = _floored_amax(values, dim=-1)
    return round_to_e4m3(values * _divide(E4M3_MAX, amax).unsqueeze(-1)), _divide(amax, E4M3_MAX)


def quantize_rows_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """As ``quantize_rows_e4m3`` to int8: float ``[..., K]`` to int8 ``[..., K]`` and float32 scales ``[...]``."""
    values = values.float()
    amax = _floored_amax(values, dim=-1)
    return round_to_int8(values * _divide(INT8_MAX, amax).unsqueeze(-1)), _divide(amax, INT8_MAX)


def quantize_row_blocks_e4m3(values: Tensor) -> tuple[Tensor, Tensor]:
    """One dynamic scale for each 1 x 128 group of a row (fp8_block's activations); the last group may be narrower.

    Args:
        values: float ``[..., K]``.

    Returns:
        E4M3 codes ``[..., K]`` and float32 scales ``[..., ceil(K / 128)]``.
    """
    columns = values.shape[-1]
    padded = _pad_to_block(values.float(), dims=(-1,))
    blocks = padded.reshape(*padded.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
    amax = _floored_amax(blocks, dim=-1)
    codes = round_to_e4m3((blocks * _divide(E4M3_MAX, amax).unsqueeze(-1)).flatten(-2)[..., :columns])
    return codes, _divide(amax, E4M3_MAX)


def quantize_tiles_e4m3(values: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for each 128 x 128 tile (fp8_block's weights); tiles at the edges may be smaller.

    Args:
        values: float ``[..., N, K]``.

    Returns:
        E4M3 codes ``[..., N, K]`` and float32 scales ``[..., ceil(N / 128), ceil(K / 128)]``.
    """
    rows, columns = values.shape[-2:]
    padded = _pad_to_block(values.float(), dims=(-2, -1))
    tiles = padded.reshape(*values.shape[:-2], padded.shape[-2] // BLOCK, BLOCK, padded.shape[-1] // BLOCK, BLOCK)
    amax = _floored_amax(tiles, dim=(-3, -1))
    scaled = (tiles * _divide(E4M3_MAX, amax)[..., :, None, :, None]).reshape(padded.shape)
    return round_to_e4m3(scaled[..., :rows, :columns]), _divide(amax, E4M3_MAX)


def quantize_static_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of ``values / scale``, one scale known beforehand (from calibration) for the whole tensor."""
    return round_to_e4m3(values.float() / scale)


def static_scale_e4m3(amax: float) -> Tensor:
    """The float32 scalar scale that maps a calibrated amax to the largest E4M3 code."""
    return torch.tensor(max(amax, AMAX_FLOOR) / E4M3_MAX, dtype=torch.float32)


def expand_row_blocks(scale: Tensor, columns: int) -> Tensor:
    """Scales ``[..., ceil(K / 128)]`` repeated to one for each column: ``[..., K]``."""
    return scale.repeat_interleave(BLOCK, dim=-1)[..., :columns]


def expand_tiles(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Scales ``[..., ceil(N / 128), ceil(K / 128)]`` repeated to one for each value: ``[..., N, K]``."""
    return scale.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)[..., :rows, :columns]


def _divide(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """Correctly rounded quotient of a tensor and a number, in either order, on any device."""
    # With a Python number torch multiplies by a reciprocal (always for number / tensor, on CUDA for tensor / number),
    # which rounds twice. A tensor on the same device is divided by as IEEE says.
    like = numerator if isinstance(numerator, Tensor) else denominator
    assert isinstance(like, Tensor)
    if not isinstance(numerator, Tensor):
        numerator = like.new_full((), numerator)
    if not isinstance(denominator, Tensor):
        denominator = like.new_full((), denominator)
    return numerator / denominator


def _floored_amax(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    # amax and clamp both carry NaN through, which is what makes a bad row visible.
    return values.abs().amax(dim=dim).clamp(min=AMAX_FLOOR)


def _pad_to_block(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    # Zeros never change an amax, so padding only gives edge groups their full width.
    for dim in dims:
        missing = -values.shape[dim] % BLOCK
        if missing:
            shape = list(values.shape)
            shape[dim] = missing
            values = torch.cat([values, values.new_zeros(shape)], dim=dim)
    return values
