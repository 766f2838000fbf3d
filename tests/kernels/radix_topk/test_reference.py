"""The reference of radix top-k against a full sort in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loka_serve.kernels.radix_topk.reference import radix_topk


def sorted_topk(row: np.ndarray, k: int) -> tuple[list[float], list[int]]:
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]
    return [float(row[index]) for index in order], order


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("distinct", [1, 3, 10_000])
def test_equals_a_full_sort_with_ties_by_index(columns: int, distinct: int) -> None:
    generator = torch.Generator().manual_seed(columns * 31 + distinct)
    scores = torch.randint(0, distinct, (5, columns), generator=generator).float() - distinct // 2
    for k in {1, columns // 2, columns - 1, columns} - {0}:
        values, indices = radix_topk(scores, k)
        for row in range(5):
            expected_values, expected_indices = sorted_topk(scores[row].numpy(), k)
            assert values[row].tolist() == expected_values
            assert indices[row].tolist() == expected_indices


def test_ragged_k_pads_with_minus_infinity() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [5.0, -1.0, 0.0], [7.0, 8.0, 9.0]])
    values, indices = radix_topk(scores, torch.tensor([2, 0, 5]))
    inf = float("inf")
    assert values.tolist() == [[3, 3, -inf, -inf, -inf], [-inf] * 5, [9, 8, 7, -inf, -inf]]
    assert indices.tolist() == [[1, 2, -1, -1, -1], [-1] * 5, [2, 1, 0, -1, -1]]


def test_minus_infinity_and_nan_keep_their_places() -> None:
    inf, nan = float("inf"), float("nan")
    _, indices = radix_topk(torch.tensor([[-inf, -inf, 2.0, -inf], [nan, 1.0, nan, inf]]), 3)
    assert indices.tolist() == [[2, 0, 1], [0, 2, 3]]


def test_empty_shapes() -> None:
    for rows, columns, k in ((0, 4, 2), (3, 0, 2), (3, 4, 0)):
        values, indices = radix_topk(torch.zeros(rows, columns), k)
        assert values.shape == indices.shape == (rows, k if rows else 0)
        assert (indices == -1).all()


def test_bad_k_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        radix_topk(torch.zeros(2, 3), torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="2 of them"):
        radix_topk(torch.zeros(2, 3), torch.tensor([1, 1, 1]))
