"""Beam attention and self-attention at the sizes of a real decode step, in every configuration, on the GPU."""

from __future__ import annotations

import pytest
import torch

from loka_serve.kernels.beam_attention import reference
from loka_serve.kernels.beam_attention.configurations import (
    CANDIDATES,
    FEW_ROWS_CANDIDATES,
    IN_USE,
    WARP_SPECIALIZED,
    Configuration,
    WarpSpecialized,
)
from loka_serve.kernels.self_attention import reference as self_reference

EVERY: list[Configuration | WarpSpecialized] = list(
    dict.fromkeys([*IN_USE, *CANDIDATES, *FEW_ROWS_CANDIDATES, *WARP_SPECIALIZED])
)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are tuned for compute capability 9.0")


def inputs(
    lengths: list[int], counts: list[int], heads: int, groups: int, shared: bool = True, head_dim: int = 128
) -> Inputs:
    generator = torch.Generator(device="cuda").manual_seed(len(lengths) * heads)
    batch, beams, slots = len(lengths), max(*counts, 1), max(lengths)
    query, keys, values = (
        torch.randn(size, device="cuda", generator=generator).bfloat16()
        for size in (
            (batch, beams, heads, head_dim),
            (batch, slots, groups, head_dim),
            (batch, slots, groups, head_dim),
        )
    )
    ragged = [torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in (lengths, counts)]
    for row, length in enumerate(lengths):
        keys[row, length:] = float("nan")
        values[row, length:] = float("nan")
    return query, keys, keys if shared else values, ragged[0], ragged[1]


def close(found: torch.Tensor, expected: torch.Tensor, relative: float, largest: float) -> None:
    """Outputs are averages of about a thousand values, so a bound on the whole is tighter than one on each."""
    assert found.isfinite().all()
    assert (found.float() - expected.float()).norm() <= relative * expected.float().norm()
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=largest)


def check(tensors: Inputs, configuration: Configuration | WarpSpecialized | None) -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention, beam_attention_fp8
    from loka_serve.kernels.beam_attention.triton_context import clear_padding, quantize_context

    query, keys, values, lengths, counts = tensors
    expected_context = reference.quantize_context(keys, values, lengths)
    context = quantize_context(keys, values, lengths)
    for field in ("keys", "values", "key_scale", "value_scale"):
        assert torch.equal(getattr(context, field).float(), getattr(expected_context, field).float()), field
    for tensor in {keys.data_ptr(): keys, values.data_ptr(): values}.values():
        clear_padding(tensor, lengths)
    # BF16 keeps 8 bits of a probability and of a result: 2**-9 each at most, less in the mean.
    if not isinstance(configuration, WarpSpecialized):
        found = beam_attention(query, keys, values, lengths, counts, configuration=configuration)
        close(found, reference.beam_attention(query, keys, values, lengths, counts), 2**-8, 2**-6)
    # Same rounding in kernel and reference, but tensor cores sum FP8 products in about 14 bits: scores move by 1e-3,
    # and one probability in 50 to the next of E4M3's numbers, 6 % away: 0.06 / sqrt(50) of the whole. A context of 77
    # slots may have a probability near 0.5, which then moves a single result by 0.06 * 0.5 * 3.
    found = beam_attention_fp8(query, context, lengths, counts, configuration=configuration)
    close(found, reference.beam_attention_fp8(query, context, lengths, counts), 2**-6, 2**-3)


@pytest.mark.parametrize("configuration", EVERY, ids=str)
def test_every_configuration(configuration: Configuration | WarpSpecialized) -> None:
    rows = 12 if isinstance(configuration, Configuration) and configuration.block_rows == 16 else 300
    check(inputs([3001, 1, 130, 2048], [rows, 7, 0, rows - 1], heads=4, groups=4), configuration)


@pytest.mark.parametrize("shared", [True, False], ids=["keys are values", "values apart"])
@pytest.mark.parametrize(("heads", "groups"), [(11, 11), (14, 14), (12, 4), (11, 1)])
@pytest.mark.parametrize("beams", [1, 40, 512])
def test_shapes_of_the_model(beams: int, heads: int, groups: int, shared: bool) -> None:
    counts = [beams, max(beams // 3, 1), beams, 1]
    check(inputs([3001, 512, 77, 1500], counts, heads, groups, shared), None)


@pytest.mark.parametrize("configuration", WARP_SPECIALIZED, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(11, 11), (12, 4), (11, 1)])
def test_warp_specialized_shapes(configuration: WarpSpecialized, heads: int, groups: int) -> None:
    check(inputs([3001, 512, 77, 1500], [1, 200, 40, 512], heads, groups, shared=False), configuration)


@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize("beams", [1, 16, 200])
def test_narrow_heads(head_dim: int, beams: int) -> None:
    check(inputs([65, 3], [beams, beams], heads=4, groups=2, shared=False, head_dim=head_dim), None)


def test_batches_of_one_and_of_many() -> None:
    check(inputs([3001], [512], heads=11, groups=11), None)
    lengths = [1 + 97 * row % 700 for row in range(33)]
    check(inputs(lengths, [13 * row % 130 for row in range(33)], heads=4, groups=4), None)


def test_whole_tiles_do_not_depend_on_the_batch() -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention
    from loka_serve.kernels.beam_attention.triton_context import clear_padding

    tensors = inputs([3001, 700, 1999], [512, 130, 64], heads=11, groups=11)
    clear_padding(tensors[1], tensors[3])
    for chosen in IN_USE:
        whole = Configuration(chosen.block_rows, chosen.block_slots, chosen.warps, chosen.stages, 0)
        together = beam_attention(*tensors, configuration=whole)
        for row in range(3):
            query, keys, values, lengths, counts = (tensor[row : row + 1] for tensor in tensors)
            alone = beam_attention(query, keys, values, lengths, counts, configuration=whole)
            assert torch.equal(alone, together[row : row + 1])


def test_repeats_bitwise_and_captures_in_a_graph() -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention
    from loka_serve.kernels.beam_attention.triton_context import clear_padding

    query, keys, values, lengths, counts = inputs([3001, 900, 2500], [512, 100, 300], heads=11, groups=11)
    clear_padding(keys, lengths)
    expected = beam_attention(query, keys, values, lengths, counts)
    out = torch.zeros_like(query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        beam_attention(query, keys, values, lengths, counts, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        for row, count in enumerate(counts.tolist()):
            assert torch.equal(out[row, :count], expected[row, :count])
    # Lengths and counts are read at replay.
    lengths.copy_(torch.tensor([64, 3001, 1]))
    counts.copy_(torch.tensor([12, 400, 0]))
    keys[1:] = torch.randn_like(keys[1:])
    graph.replay()
    changed = reference.beam_attention(query, keys, values, lengths, counts)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(out[row, :count], changed[row, :count], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(("batch", "beams", "heads"), [(1, 512, 11), (8, 512, 14), (3, 37, 5)])
def test_self_attention_over_three_levels(batch: int, beams: int, heads: int) -> None:
    from loka_serve.kernels.self_attention.triton import extend_ancestors, self_attention

    generator = torch.Generator(device="cuda").manual_seed(beams)
    caches = [torch.zeros(2, batch, beams, heads, 128, device="cuda").bfloat16() for _ in range(4)]
    ancestors = expected_ancestors = None
    for level in range(3):
        width = 1 if level == 0 else beams
        counts = torch.full((batch,), width, dtype=torch.int32, device="cuda")
        if level:
            most = 1 if level == 1 else beams
            parents = torch.randint(0, most, (batch, beams), device="cuda", generator=generator).int()
            ancestors = extend_ancestors(ancestors, parents)
            expected_ancestors = self_reference.extend_ancestors(expected_ancestors, parents)
            assert torch.equal(ancestors, expected_ancestors)
        qkv = torch.randn(batch, width, 3, heads, 128, device="cuda", generator=generator).bfloat16()
        expected = self_reference.self_attention(qkv, caches[2], caches[3], expected_ancestors, counts, level)
        found = self_attention(qkv, caches[0], caches[1], ancestors, counts, level)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)
        assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
