"""Norm, SwiGLU, quantization, embedding and rotation on the GPU: exactness, tilings, independent rows, graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from loka_serve.kernels.embed_context import reference as embed_reference
from loka_serve.kernels.embed_context.triton import embed_context, embed_context_quantize
from loka_serve.kernels.norm_quantize import reference as norm_reference
from loka_serve.kernels.norm_quantize.triton import residual_norm_both
from loka_serve.kernels.quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3
from loka_serve.kernels.quantize.tilings import CANDIDATES, RowTiling
from loka_serve.kernels.quantize.triton import BLOCK_SCALES, ROW_SCALES, quantize_activation
from loka_serve.kernels.rotary import reference as rotary_reference
from loka_serve.kernels.rotary.triton import rotate_keys, rotate_queries
from loka_serve.kernels.swiglu_quantize import reference as swiglu_reference
from loka_serve.kernels.swiglu_quantize.triton import swiglu, swiglu_quantize
from tests.kernels.embed_context.cases import make_arguments

WIDTH = 1408
FORMS: list[tuple[bool, int, Callable[[Tensor], tuple[Tensor, Tensor]]]] = [
    (False, ROW_SCALES, quantize_rows_e4m3),
    (True, BLOCK_SCALES, quantize_row_blocks_e4m3),
]


@pytest.fixture(autouse=True)
def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("E4M3 conversion needs compute capability 8.9")


def rows_of(count: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    """Rows of very different size."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, width, device="cuda", generator=generator)
    return (x * 10 ** torch.randn(count, 1, device="cuda", generator=generator)).bfloat16()


def equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.float().nan_to_num(1e30), b.float().nan_to_num(1e30)) for a, b in pairs)


@pytest.mark.parametrize("tiling", [None, *CANDIDATES], ids=str)
@pytest.mark.parametrize(("block_scales", "scales", "reference"), FORMS)
def test_quantization_is_exact(
    block_scales: bool, scales: int, reference: Callable[[Tensor], tuple[Tensor, Tensor]], tiling: RowTiling | None
) -> None:
    for count, width in ((1, WIDTH), (3001, WIDTH), (70, 3840), (5, 200)):
        x = rows_of(count, width)
        if count > 60:
            x[5, 3], x[6, 7], x[7] = float("nan"), float("inf"), 0
        assert equal(quantize_activation(x, scales, tiling), reference(x))


@pytest.mark.parametrize("tiling", [None, *CANDIDATES], ids=str)
@pytest.mark.parametrize(("block_scales", "scales", "reference"), FORMS)
def test_norm_and_its_codes(
    block_scales: bool, scales: int, reference: Callable[[Tensor], tuple[Tensor, Tensor]], tiling: RowTiling | None
) -> None:
    for count, added in ((1, True), (3001, True), (3001, False)):
        x, gain = rows_of(count), torch.rand(WIDTH, device="cuda") + 0.5
        residual = rows_of(count, seed=1) if added else None
        total, normed, codes, scale = residual_norm_both(x, residual, gain, 1e-6, block_scales, tiling)
        expected_total, expected = norm_reference.residual_norm(x, residual, gain, 1e-6)
        assert torch.equal(total, expected_total)
        torch.testing.assert_close(normed, expected, rtol=2**-7, atol=1e-6)
        assert equal((codes, scale), reference(normed)), "codes of the norm as it is stored"


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    x, residual, gain = rows_of(5000), rows_of(5000, seed=1), torch.rand(WIDTH, device="cuda") + 0.5
    whole = residual_norm_both(x, residual, gain, 1e-6, True)
    for count in (1, 7, 300):
        few = residual_norm_both(x[:count], residual[:count], gain, 1e-6, True)
        assert equal(few, tuple(part[:count] for part in whole))


@pytest.mark.parametrize("width", [WIDTH, 3840])
@pytest.mark.parametrize(("block_scales", "scales", "reference"), FORMS)
def test_swiglu_and_its_codes(
    block_scales: bool, scales: int, reference: Callable[[Tensor], tuple[Tensor, Tensor]], width: int
) -> None:
    for count in (1, 300, 3001):
        gate_up = torch.randn(count, 2 * width, device="cuda").mul_(3).bfloat16()
        activated = swiglu(gate_up)
        torch.testing.assert_close(activated, swiglu_reference.swiglu(gate_up), rtol=2**-7, atol=1e-6)
        assert equal(swiglu_quantize(gate_up, block_scales), reference(activated))


@pytest.mark.parametrize(("lengths", "levels"), [([0, 511, 80], 3), ([3000] * 2, 3), ([5, 9], 5), ([700], 2)])
@pytest.mark.parametrize("short_term_length", [0, 20])
def test_embedding_is_exact(lengths: list[int], levels: int, short_term_length: int) -> None:
    items = max(lengths)
    arguments = make_arguments(lengths, items, levels, WIDTH, "cuda", True, short_term_length, codes=8192)
    expected = embed_reference.embed_context(*arguments)
    assert torch.equal(embed_context(*arguments), expected)
    for tiling in CANDIDATES:
        assert torch.equal(embed_context(*arguments, tiling=tiling), expected)
    for block_scales, _, reference in FORMS:
        assert equal(embed_context_quantize(*arguments, block_scales), reference(expected))


def test_rotation() -> None:
    query = torch.randn(3, 100, 11, 128, device="cuda").bfloat16()
    positions = torch.tensor([0, 2999, 511], dtype=torch.int32, device="cuda")
    keys = torch.randn(2, 3001, 22, 128, device="cuda").bfloat16()[:, :, 11:]
    # Sums of two products with another rounding in between: a value next to a tie may move by one step of BF16.
    tolerance = {"rtol": 2**-7, "atol": 2**-10}
    expected = rotary_reference.rotate_queries(query, positions, 1e4)
    torch.testing.assert_close(rotate_queries(query, positions, 1e4), expected, **tolerance)
    torch.testing.assert_close(rotate_queries(query, positions, 1e4, out=query), expected, **tolerance)
    expected = rotary_reference.rotate_keys(keys, 1e4)
    torch.testing.assert_close(rotate_keys(keys, 1e4), expected, **tolerance)
    torch.testing.assert_close(rotate_keys(keys, 1e4, out=keys), expected, **tolerance)


def test_one_graph_serves_other_histories() -> None:
    first = make_arguments([511, 3], 511, 3, WIDTH, "cuda", codes=8192)
    second = make_arguments([20, 400], 511, 3, WIDTH, "cuda", codes=100)
    history, lengths = first[0].clone(), first[1].clone()
    arguments = (history, lengths, *first[2:])
    gain = torch.ones(WIDTH, device="cuda")

    def run() -> tuple[Tensor, ...]:
        rows = embed_context(*arguments)
        codes, scale = embed_context_quantize(*arguments, block_scales=True)
        keys = rotate_keys(rows.view(2, 512, 11, 128), 1e4)
        queries = rotate_queries(keys, lengths, 1e4, out=keys)
        return rows, codes, scale, queries, *residual_norm_both(rows, None, gain, 1e-6, False)[1:]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for other in (first, second):
        history.copy_(other[0])
        lengths.copy_(other[1])
        graph.replay()
        assert equal(out, run())
