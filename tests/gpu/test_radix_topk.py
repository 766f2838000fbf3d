"""The CUDA kernels of radix top-k against the reference, on every path and on inputs made to break them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loka_serve.kernels.radix_topk.reference import radix_topk as reference

INPUTS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda rows, columns: torch.randn(rows, columns, device="cuda"),
    "few distinct values": lambda rows, columns: torch.randint(0, 3, (rows, columns), device="cuda").float() - 1,
    "all equal": lambda rows, columns: torch.full((rows, columns), -2.5, device="cuda"),
    "mostly minus infinity": lambda rows, columns: torch.where(
        torch.rand(rows, columns, device="cuda") < 0.01, torch.randn(rows, columns, device="cuda"), float("-inf")
    ),
    "ascending": lambda rows, columns: torch.arange(columns, device="cuda").float().expand(rows, -1).contiguous(),
    "descending": lambda rows, columns: -torch.arange(columns, device="cuda").float().expand(rows, -1).contiguous(),
    "one outlier, signed zeros": lambda rows, columns: (
        torch.zeros(rows, columns, device="cuda") * torch.randn(rows, columns, device="cuda").sign()
    ).index_fill_(1, torch.tensor([columns // 2], device="cuda"), 3e38),
    "across zero": lambda rows, columns: torch.randn(rows, columns, device="cuda") * 2 - 4,
    "few finite": lambda rows, columns: torch.where(
        torch.rand(rows, columns, device="cuda") < 400 / columns,
        torch.randn(rows, columns, device="cuda"),
        float("-inf"),
    ),
    "masked far below": lambda rows, columns: torch.where(
        torch.rand(rows, columns, device="cuda") < 0.1, torch.randn(rows, columns, device="cuda"), -1e30
    ),
    "all minus infinity": lambda rows, columns: torch.full((rows, columns), float("-inf"), device="cuda"),
    "huge range": lambda rows, columns: torch.randn(rows, columns, device="cuda").mul_(80).exp_(),
    "nan and infinity": lambda rows, columns: (
        torch.randn(rows, columns, device="cuda")
        .index_fill_(1, torch.tensor([0, columns - 1], device="cuda"), float("nan"))
        .index_fill_(1, torch.tensor([columns // 3], device="cuda"), float("inf"))
    ),
}
COLUMNS = (1, 5, 127, 1024, 3001, 4096, 8192, 12_000, 32_768, 40_001, 70_000, 524_288, 4_194_304)


def assert_equal(scores: torch.Tensor, k: int, row_k: torch.Tensor | None = None) -> None:
    from loka_serve.kernels.radix_topk.cuda import radix_topk

    values, indices = radix_topk(scores, k, row_k)
    wanted = k if row_k is None else row_k.long().clamp(0, k)
    expected_values, expected_indices = reference(scores, wanted)
    width = expected_values.shape[1]
    assert torch.equal(indices[:, :width].long(), expected_indices)
    torch.testing.assert_close(values[:, :width], expected_values, rtol=0, atol=0, equal_nan=True)
    assert (indices[:, width:] == -1).all() and (values[:, width:] == float("-inf")).all()


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_equals_reference(name: str, columns: int) -> None:
    torch.manual_seed(columns)
    rows = 3 if columns > 100_000 else 17
    scores = INPUTS[name](rows, columns)
    for k in (1, 16, 512, 1000):
        assert_equal(scores, k)


@pytest.mark.parametrize("columns", [3001, 8192])
@pytest.mark.parametrize("configuration", range(11))
def test_every_configuration_on_more_rows_than_fit_at_once(configuration: int, columns: int) -> None:
    from loka_serve.kernels.radix_topk.cuda import radix_topk
    from loka_serve.kernels.radix_topk.sweep import CANDIDATES

    assert len(CANDIDATES) == 11
    for name in INPUTS:
        torch.manual_seed(columns)
        scores = INPUTS[name](2000, columns)
        values, indices = radix_topk(scores, 512, configuration=CANDIDATES[configuration])
        expected_values, expected_indices = reference(scores, 512)
        assert torch.equal(indices.long(), expected_indices), name
        torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)


def test_ragged_k_and_strided_rows() -> None:
    torch.manual_seed(0)
    for columns in (700, 8192, 200_000):
        scores = torch.randn(9, columns + 3, device="cuda")[:, :columns]
        row_k = torch.tensor([0, 1, 2, 511, 512, 600, 5, -3, 64], dtype=torch.int32, device="cuda")
        assert_equal(scores, 512, row_k)


def test_captures_in_a_graph_and_overwrites_poison() -> None:
    from loka_serve.kernels.radix_topk.cuda import radix_topk

    scores = torch.randn(4, 100_000, device="cuda")
    radix_topk(scores, 100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, indices = radix_topk(scores, 100)
    for seed in range(3):
        scores.copy_(torch.randn(4, 100_000, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
        values.fill_(float("nan"))
        indices.fill_(12345)
        graph.replay()
        expected_values, expected_indices = reference(scores, 100)
        assert torch.equal(values, expected_values) and torch.equal(indices.long(), expected_indices)


def test_wrong_arguments_are_named() -> None:
    from loka_serve.kernels.radix_topk.cuda import radix_topk

    with pytest.raises(ValueError, match="scores"):
        radix_topk(torch.zeros(2, 3, device="cuda", dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="k = 5000"):
        radix_topk(torch.zeros(2, 3, device="cuda"), 5000)
    with pytest.raises(ValueError, match="row_k"):
        radix_topk(torch.zeros(2, 3, device="cuda"), 1, torch.zeros(3, dtype=torch.int32, device="cuda"))
