"""Rounding to E4M3 and INT8 against a table of all codes, and the scales of each grouping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loka_serve.kernels.quantize.reference import (
    AMAX_FLOOR,
    expand_row_blocks,
    expand_tiles,
    quantize_row_blocks_e4m3,
    quantize_rows_e4m3,
    quantize_rows_int8,
    quantize_static_e4m3,
    quantize_tiles_e4m3,
    round_to_e4m3,
    round_to_int8,
    static_scale_e4m3,
)


def e4m3_value(code: int) -> float:
    """The number that an E4M3 code stands for, from its definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest_code_values(values: np.ndarray) -> np.ndarray:
    """Brute force over the finite codes: the nearest one, of two equally near ones that with the even mantissa."""
    codes = [code for code in range(256) if not math.isnan(e4m3_value(code))]
    table = np.array([e4m3_value(code) for code in codes])
    is_odd = np.array([code & 1 for code in codes])
    distance = np.abs(values[:, None] - table)
    nearest = distance == distance.min(1, keepdims=True)
    return table[np.where(nearest, is_odd, 2).argmin(1)]


def test_every_code_is_what_the_format_defines() -> None:
    decoded = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decoded, np.array([e4m3_value(code) for code in range(256)], np.float32))


def test_codes_round_to_themselves() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[~codes.view(torch.float8_e4m3fn).float().isnan()]
    assert torch.equal(round_to_e4m3(finite.view(torch.float8_e4m3fn).float()).view(torch.uint8), finite)


def test_rounds_to_the_nearest_code() -> None:
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.cat([torch.exp2(torch.rand(4000, generator=generator) * 22 - 12), torch.linspace(0, 500, 3001)])
    values = torch.cat([magnitudes, -magnitudes])
    # Halfway points are exact in float32 and float64, so equality is exact.
    expected = nearest_code_values(values.double().numpy())
    np.testing.assert_array_equal(round_to_e4m3(values).double().numpy(), expected)


def test_ties_go_to_the_even_code() -> None:
    finite = [e4m3_value(code) for code in range(0x7F)]  # 0x7F is NaN; positive codes ascend
    ties = np.array([(low + high) / 2 for low, high in zip(finite, finite[1:], strict=False)])
    assert len(ties) == 126
    np.testing.assert_array_equal(round_to_e4m3(torch.from_numpy(ties)).double().numpy(), nearest_code_values(ties))
    # Two by hand: codes around 1.0 are 1/8 apart; the smallest subnormal is 2**-9.
    assert round_to_e4m3(torch.tensor([1.0625, 1.1875])).float().tolist() == [1.0, 1.25]
    assert round_to_e4m3(torch.tensor([2.0**-10, 1.5 * 2.0**-9])).float().tolist() == [0.0, 2.0**-8]


def test_saturates_and_keeps_nan() -> None:
    values = torch.tensor([448.0, 448.1, 464.0, 480.0, 1e30, math.inf, -1e9, -math.inf])
    assert round_to_e4m3(values).float().tolist() == [448.0] * 6 + [-448.0] * 2
    assert round_to_e4m3(torch.tensor([math.nan])).float().isnan().all()


def test_int8_rounds_ties_to_even_and_is_symmetric() -> None:
    values = torch.tensor([0.5, 1.5, -0.5, -2.5, 126.6, 127.5, 200.0, -128.0, -math.inf, math.nan])
    assert round_to_int8(values).tolist() == [0, 2, 0, -2, 127, 127, 127, -127, -127, 0]


@pytest.mark.parametrize(("quantize", "largest"), [(quantize_rows_e4m3, 448.0), (quantize_rows_int8, 127.0)])
def test_row_scales_map_each_rows_amax_to_the_largest_code(quantize, largest: float) -> None:  # type: ignore[no-untyped-def]
    values = torch.tensor([[1.0, -3.5, 0.25], [1e-3, 0.0, -2e-4]])
    codes, scale = quantize(values)
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale, torch.tensor([3.5, 1e-3]) / largest, rtol=0, atol=0)
    assert codes.float()[0, 1] == -largest and codes.float()[1, 0] == largest


@pytest.mark.parametrize(("quantize", "largest"), [(quantize_rows_e4m3, 448.0), (quantize_rows_int8, 127.0)])
def test_scales_are_correctly_rounded_quotients(quantize, largest: float) -> None:  # type: ignore[no-untyped-def]
    amax = torch.rand(5000, 1, generator=torch.Generator().manual_seed(0)) + 0.01
    _, scale = quantize(amax)
    expected = (amax[:, 0].numpy() / np.float32(largest)).astype(np.float32)
    np.testing.assert_array_equal(scale.numpy(), expected)
    # The codes use largest / amax, rounded once: the middle of a row then lands where IEEE arithmetic puts it.
    rows = torch.cat([amax, amax * torch.rand(5000, 1, generator=torch.Generator().manual_seed(1))], dim=1)
    codes, _ = quantize(rows)
    factor = np.float32(largest) / amax[:, 0].numpy()
    rounding = round_to_e4m3 if largest == 448.0 else round_to_int8
    expected_codes = rounding(torch.from_numpy(rows[:, 1].numpy() * factor))
    assert torch.equal(codes[:, 1].float(), expected_codes.float())


def test_row_blocks_have_a_scale_each_and_a_narrower_last_one() -> None:
    values = torch.zeros(2, 300)
    values[0, 5], values[0, 130], values[0, 299] = 4.0, -8.0, 2.0
    codes, scale = quantize_row_blocks_e4m3(values)
    assert codes.shape == (2, 300) and scale.shape == (2, 3)
    floor = torch.tensor(AMAX_FLOOR)
    assert torch.equal(scale, torch.stack([torch.tensor([4.0, 8.0, 2.0]), floor.expand(3)]) / 448.0)
    assert torch.equal(codes.float() * expand_row_blocks(scale, 300), values)


def test_tiles_have_a_scale_each_and_smaller_ones_at_the_edges() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 130, 257, generator=generator)
    codes, scale = quantize_tiles_e4m3(values)
    assert codes.shape == values.shape and scale.shape == (3, 2, 3)
    for group in range(3):
        for row in range(2):
            for column in range(3):
                rows, columns = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                tile = values[group, rows, columns]
                assert scale[group, row, column] == tile.abs().max() / 448.0
                expected = round_to_e4m3(tile * (torch.tensor(448.0) / tile.abs().max()))
                assert torch.equal(codes[group, rows, columns].view(torch.uint8), expected.view(torch.uint8))
    expanded = expand_tiles(scale, 130, 257)
    assert expanded.shape == values.shape and expanded[2, 129, 256] == scale[2, 1, 2]


def test_a_tile_grouping_of_one_row_block_equals_the_row_block() -> None:
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(1, 300, generator=generator)
    tile_codes, tile_scale = quantize_tiles_e4m3(row)
    block_codes, block_scale = quantize_row_blocks_e4m3(row)
    assert torch.equal(tile_scale, block_scale)
    assert torch.equal(tile_codes.view(torch.uint8), block_codes.view(torch.uint8))


def test_all_zero_rows_stay_zero() -> None:
    for quantize in (quantize_rows_e4m3, quantize_rows_int8, quantize_row_blocks_e4m3):
        codes, scale = quantize(torch.zeros(2, 200))
        assert (codes.float() == 0).all() and (scale > 0).all() and scale.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantize", [quantize_rows_e4m3, quantize_rows_int8])
def test_a_bad_value_spoils_its_own_row_only(quantize, bad: float) -> None:  # type: ignore[no-untyped-def]
    values = torch.ones(3, 8)
    values[1, 2] = bad
    codes, scale = quantize(values)
    products = (codes.float() * scale[:, None]).sum(1)
    assert products[1].isnan() and products[[0, 2]].tolist() == [8.0, 8.0]


def test_static_scale_divides_and_saturates() -> None:
    scale = static_scale_e4m3(2.0)
    assert scale == torch.tensor(2.0) / 448.0
    codes = quantize_static_e4m3(torch.tensor([2.0, -1.0, 5.0, math.inf]), scale)
    assert codes.float().tolist() == [448.0, -224.0, 448.0, 448.0]
    assert quantize_static_e4m3(torch.tensor([math.nan]), scale).float().isnan().all()
    assert static_scale_e4m3(0.0) > 0
