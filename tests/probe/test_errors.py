"""Error figures against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from loka_serve.probe.errors import logits_agreement, output_error, routing_agreement


def test_figures_by_hand() -> None:
    reference = torch.tensor([3.0, -4.0, 0.0, 0.1])
    output = torch.tensor([3.3, -4.0, 0.0, 0.2])
    error = output_error(output, reference)
    norm = math.sqrt(9 + 16 + 0.01)
    assert error.relative_frobenius == pytest.approx(math.sqrt(0.09 + 0.01) / norm, rel=1e-6)
    assert error.sqnr_db == pytest.approx(20 * math.log10(norm / math.sqrt(0.1)), rel=1e-6)
    assert error.mere == pytest.approx((0.1 + 0 + 0 + 1.0) / 4, rel=1e-5)
    # RMS = 2.5005, so .1 is floored at .25005.
    assert error.floored_mere == pytest.approx((0.1 + 0.1 / (0.1 * norm / 2)) / 4, rel=1e-5)


def test_no_error() -> None:
    error = output_error(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    assert (error.relative_frobenius, error.mere, error.floored_mere) == (0.0, 0.0, 0.0)
    assert error.sqnr_db == math.inf
    assert output_error(torch.zeros(3), torch.zeros(3)).floored_mere == 0.0


def test_an_error_where_the_reference_is_zero_is_infinite() -> None:
    error = output_error(torch.tensor([1.0, 1.0]), torch.zeros(2))
    assert error.relative_frobenius == math.inf and error.floored_mere == math.inf and error.sqnr_db == -math.inf


def test_nan_spoils_every_figure() -> None:
    error = output_error(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert all(map(math.isnan, (error.relative_frobenius, error.sqnr_db, error.mere, error.floored_mere)))


def test_logits_agreement() -> None:
    reference = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 5.0, 4.0]])
    same = logits_agreement(reference + 3.0, reference, 2)  # a shift changes no probability
    assert same.kl_divergence == pytest.approx(0.0, abs=1e-12) and same.top_k_overlap == 1.0
    changed = reference.clone()
    changed[0, 1], changed[0, 2] = 0.0, 1.0  # one of four top codes changes
    agreement = logits_agreement(changed, reference, 2)
    assert agreement.top_k_overlap == 0.75
    probabilities = reference[0].softmax(0)
    expected = ((probabilities[1] - probabilities[2]) * 1.0).item() / 2
    assert agreement.kl_divergence == pytest.approx(expected, rel=1e-5)


def test_k_is_cut_to_half_the_codes() -> None:
    reference = torch.arange(4.0)[None]
    assert logits_agreement(-reference, reference, 50).top_k_overlap == 0.0


def test_routing_agreement_counts_selected_experts() -> None:
    reference = torch.tensor([[3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.5, 2.0]])
    no_bias = torch.zeros(3)
    assert routing_agreement(scores, reference, no_bias, 2) == 0.75
    assert routing_agreement(scores, reference, no_bias, 1) == 1.0
    # A bias that always selects experts 0 and 1 hides any change of the scores.
    assert routing_agreement(scores, reference, torch.tensor([5.0, 5.0, 0.0]), 2) == 1.0
