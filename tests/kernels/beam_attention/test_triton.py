"""The kernels against their references: in Triton's interpreter without a GPU, on the GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loka_serve.kernels.beam_attention import reference
from loka_serve.kernels.beam_attention.configurations import Configuration
from tests.kernels.devices import DEVICE, needs_triton

pytestmark = needs_triton

# BF16 probabilities are off by at most 2**-9 of themselves, so is the output, whose values are of order 1.
TOLERANCE = {"rtol": 2**-7, "atol": 2**-8}
# The reference rounds as the kernel does; sums in another order move a value across a tie now and then.
FP8_TOLERANCE = {"rtol": 2**-7, "atol": 2**-9}

WHOLE_TILES = Configuration(block_rows=16, block_slots=32, warps=4, stages=2, programs_per_sm=0)
CONFIGURATIONS = {
    "whole tiles": WHOLE_TILES,
    "whole tiles, a warpgroup": Configuration(64, 64, 4, 2, 0),
    "split": Configuration(16, 32, 4, 2, 1),
    "split in single blocks": Configuration(16, 32, 4, 2, 5, least_blocks=1),
}
# (batch, beams, heads, groups, head_dim, slots), lengths, beam counts
SHAPES: dict[str, tuple[tuple[int, ...], list[int], list[int]]] = {
    "ragged, one group a head": ((3, 21, 2, 2, 32, 130), [1, 130, 77], [21, 3, 0]),
    "one beam, one group": ((2, 1, 11, 1, 16, 70), [70, 33], [1, 1]),
    "grouped, one block": ((1, 6, 6, 2, 64, 32), [32], [5]),
    "empty request": ((2, 4, 4, 4, 16, 40), [0, 40], [4, 4]),
}


def inputs(shape: tuple[int, ...], lengths: list[int], counts: list[int], shared: bool) -> list[torch.Tensor]:
    batch, beams, heads, groups, head_dim, slots = shape
    generator = torch.Generator().manual_seed(beams * slots)
    query = 2 * torch.randn(batch, beams, heads, head_dim, generator=generator)
    # As slices of one projection: strides that no contiguous tensor has.
    context = torch.randn(batch, slots, 2, groups, head_dim, generator=generator).bfloat16().to(DEVICE)
    keys, values = context[:, :, 0], context[:, :, 0 if shared else 1]
    ragged = [torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (lengths, counts)]
    return [query.bfloat16().to(DEVICE), keys, values, *ragged]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("shared", [True, False], ids=["keys are values", "values apart"])
def test_bf16(name: str, configuration: str, shared: bool) -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention
    from loka_serve.kernels.beam_attention.triton_context import clear_padding

    query, keys, values, lengths, counts = inputs(*SHAPES[name], shared)
    for row, length in enumerate(lengths.tolist()):
        keys[row, length:] = float("nan")
        values[row, length:] = float("inf")
    expected = reference.beam_attention(query, keys, values, lengths, counts)
    clear_padding(keys, lengths)
    clear_padding(values, lengths)
    found = beam_attention(query, keys, values, lengths, counts, configuration=CONFIGURATIONS[configuration])
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("shared", [True, False], ids=["keys are values", "values apart"])
def test_fp8(name: str, configuration: str, shared: bool) -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention_fp8
    from loka_serve.kernels.beam_attention.triton_context import quantize_context

    query, keys, values, lengths, counts = inputs(*SHAPES[name], shared)
    for row, length in enumerate(lengths.tolist()):
        keys[row, length:] = float("nan")
    expected_context = reference.quantize_context(keys, values, lengths)
    context = quantize_context(keys, values, lengths)
    for field in ("keys", "values", "key_scale", "value_scale"):
        assert torch.equal(getattr(context, field).float(), getattr(expected_context, field).float()), field
    expected = reference.beam_attention_fp8(query, expected_context, lengths, counts)
    found = beam_attention_fp8(query, context, lengths, counts, configuration=CONFIGURATIONS[configuration])
    torch.testing.assert_close(found, expected, **FP8_TOLERANCE)


def test_a_request_alone_and_in_a_batch_are_equal_with_whole_tiles() -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention

    query, keys, values, lengths, counts = inputs((3, 18, 2, 1, 16, 90), [90, 40, 64], [18, 9, 4], True)
    together = beam_attention(query, keys, values, lengths, counts, configuration=WHOLE_TILES)
    for row in range(3):
        part = slice(row, row + 1)
        arguments = [tensor[part] for tensor in (query, keys, values, lengths, counts)]
        assert torch.equal(beam_attention(*arguments, configuration=WHOLE_TILES), together[part])


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # NumPy's, in the interpreter
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_large_scores_and_poisoned_beams(configuration: str) -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention, beam_attention_fp8
    from loka_serve.kernels.beam_attention.triton_context import quantize_context

    query, keys, values, lengths, counts = inputs((2, 3, 2, 2, 32, 96), [90, 96], [3, 3], False)
    query[0, 0] *= 300
    query[0, 1] *= -300
    query[0, 2, 0, 5] = float("nan")
    query[1, 0, 1, 0] = float("inf")
    chosen = CONFIGURATIONS[configuration]
    found = beam_attention(query, keys, values, lengths, counts, configuration=chosen)
    expected = reference.beam_attention(query, keys, values, lengths, counts)
    bad = torch.zeros(2, 3, 2, dtype=torch.bool, device=DEVICE)
    bad[0, 2, 0] = bad[1, 0, 1] = True
    assert expected[bad].isnan().all() and found[bad].isnan().all(), "a poisoned row must not come out as numbers"
    torch.testing.assert_close(found[~bad], expected[~bad], **TOLERANCE)
    context = quantize_context(keys, values, lengths)
    found = beam_attention_fp8(query, context, lengths, counts, configuration=chosen)
    assert found[bad].isnan().all() and found[~bad].isfinite().all()


def test_dead_beams_keep_what_out_holds() -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention

    query, keys, values, lengths, counts = inputs((2, 20, 2, 2, 16, 40), [40, 7], [17, 0], True)
    out = torch.full_like(query, 7.0)
    returned = beam_attention(query, keys, values, lengths, counts, out=out)
    assert returned is out
    assert (out[0, 17:] == 7).all() and (out[1] == 7).all()
    expected = reference.beam_attention(query, keys, values, lengths, counts)
    torch.testing.assert_close(out[0, :17], expected[0, :17], **TOLERANCE)


def test_fp8_error_is_that_of_the_format() -> None:
    query, keys, values, lengths, counts = inputs((1, 64, 2, 2, 128, 1000), [1000], [64], True)
    exact = reference.beam_attention(query, keys, values, lengths, counts).float()
    context = reference.quantize_context(keys, values, lengths)
    rounded = reference.beam_attention_fp8(query, context, lengths, counts).float()
    # E4M3 keeps 4 bits: about 2.6 % of a normal number, for each of query, key, probability and value.
    assert 0.005 < (rounded - exact).norm() / exact.norm() < 0.08


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 2, 4, 24).bfloat16()}, "query"),
        ({"query": torch.zeros(1, 2, 4, 16)}, "query"),
        ({"keys": torch.zeros(1, 8, 3, 16).bfloat16(), "values": torch.zeros(1, 8, 3, 16).bfloat16()}, "divides 4"),
        ({"values": torch.zeros(1, 9, 2, 16).bfloat16()}, "values"),
        ({"keys": torch.zeros(1, 16, 2, 8).bfloat16().transpose(1, 3)}, "keys"),
        ({"lengths": torch.zeros(1, dtype=torch.int64)}, "lengths"),
        ({"beam_counts": torch.zeros(2, dtype=torch.int32)}, "beam_counts"),
        ({"out": torch.zeros(1, 2, 4, 32).bfloat16()}, "out"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention

    context = torch.zeros(1, 8, 2, 16).bfloat16()
    one = torch.ones(1, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 2, 4, 16).bfloat16(),
        "keys": context,
        "values": context,
        "lengths": one,
        "beam_counts": one,
    }
    with pytest.raises(ValueError, match=message):
        beam_attention(**{**arguments, **change})
