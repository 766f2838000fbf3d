"""How far a recipe's output is from a float32 reference, and what that does to codes and experts chosen from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MERE_FLOOR = 0.1
"""Floored MERE divides by at least this share of the reference's root mean square."""


@dataclass(frozen=True)
class OutputError:
    """Error of an output against its reference.

    Attributes:
        relative_frobenius: ||out - ref|| / ||ref||.
        sqnr_db: signal to quantization noise ratio in decibels, -20 log10(relative_frobenius).
        mere: mean of |out - ref| / |ref| (arXiv 2605.10886). Heavy-tailed: outputs near zero dominate it.
        floored_mere: the same with |ref| floored at 0.1 RMS(ref); steady from draw to draw, so decisions use it.
    """

    relative_frobenius: float
    sqnr_db: float
    mere: float
    floored_mere: float


def output_error(output: Tensor, reference: Tensor) -> OutputError:
    """Compare two tensors of the same shape, in float64.

    Equal values count as no error even where the reference is zero. A NaN in the output makes every figure NaN.
    """
    output, reference = output.double(), reference.double()
    difference = (output - reference).abs()
    magnitude = reference.abs()
    floor = MERE_FLOOR * reference.square().mean().sqrt()
    relative = _ratio(difference.norm(), reference.norm())
    return OutputError(
        relative_frobenius=relative.item(),
        sqnr_db=-20.0 * math.log10(relative.item()) if relative > 0 else (math.inf if relative == 0 else math.nan),
        mere=_ratio(difference, magnitude).mean().item(),
        floored_mere=_ratio(difference, magnitude.clamp(min=floor)).mean().item(),
    )


def _ratio(difference: Tensor, magnitude: Tensor) -> Tensor:
    return torch.where(difference == 0, torch.zeros_like(difference), difference / magnitude)


@dataclass(frozen=True)
class LogitsAgreement:
    """What a head's rounding does to the codes chosen from its logits.

    Attributes:
        kl_divergence: mean KL(reference || quantized) of the level's softmax over rows, in nats.
        top_k_overlap: mean share of the reference's k best codes that stay among the k best.
    """

    kl_divergence: float
    top_k_overlap: float


def logits_agreement(logits: Tensor, reference: Tensor, k: int) -> LogitsAgreement:
    """Compare logits ``[M, V]``; k is cut to V / 2, since for k near V any two rankings overlap."""
    expected = reference.double().log_softmax(-1)
    divergence = (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1).mean()
    k = max(1, min(k, reference.shape[-1] // 2))
    return LogitsAgreement(divergence.item(), _selection_overlap(logits, reference, k))


def routing_agreement(scores: Tensor, reference: Tensor, selection_bias: Tensor, experts_per_token: int) -> float:
    """Mean share of a row's experts that a router's rounding leaves selected.

    Args:
        scores, reference: router outputs ``[M, experts]`` before the sigmoid.
        selection_bias: ``[experts]``, added to the sigmoid scores to select.
    """
    bias = selection_bias.float()
    return _selection_overlap(scores.float().sigmoid() + bias, reference.float().sigmoid() + bias, experts_per_token)


def _selection_overlap(scores: Tensor, reference: Tensor, k: int) -> float:
    chosen = torch.zeros_like(reference, dtype=torch.bool)
    chosen.scatter_(-1, reference.topk(k, dim=-1).indices, True)
    return chosen.gather(-1, scores.topk(k, dim=-1).indices).double().mean().item()
