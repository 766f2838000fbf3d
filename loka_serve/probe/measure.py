"""Error of each recipe at one site, on the real inputs that calibration sampled, against a float32 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.probe.errors import (
    LogitsAgreement,
    OutputError,
    logits_agreement,
    output_error,
    routing_agreement,
)
from loka_serve.quantization.methods import SiteMethod
from loka_serve.quantization.recipes import RECIPES

HEAD_TOP_K = 50
PIECE_OUTPUTS = 512
"""Output channels that are measured at once: whole tiles, so that no scale changes."""


@dataclass(frozen=True)
class Routing:
    """What a router's output is used for: the experts with the largest sigmoid(score) + bias are selected."""

    selection_bias: Tensor
    experts_per_token: int


@dataclass(frozen=True)
class RecipeError:
    """A recipe's error at a site.

    Attributes:
        output: over all sampled rows.
        worst_group, worst_group_floored_mere: the group of a grouped site with the largest floored MERE.
        logits: of a head, else None.
        routing: share of experts that a router still selects, else None.
    """

    output: OutputError
    worst_group: int | None = None
    worst_group_floored_mere: float | None = None
    logits: LogitsAgreement | None = None
    routing: float | None = None


@torch.inference_mode()
def measure_site(
    weight: Tensor,
    rows: Tensor,
    group_offsets: Tensor | None,
    input_amax: float,
    recipes: Sequence[str],
    is_head: bool = False,
    routing: Routing | None = None,
) -> dict[str, RecipeError]:
    """Measure recipes at one site.

    Args:
        weight: [out, in] or [groups, out, in], any float dtype.
        rows: float32 [M, in] sampled inputs, M > 0, sorted by group for a grouped site.
        group_offsets: int64 [groups + 1] for a grouped site.
        input_amax: from calibration, over all rows.
        is_head, routing: ask for what the error does to the codes or experts that are chosen from the output.

    Raises:
        QuantizationError: the weight cannot be quantized.
    """
    rows = rows.to(weight.device)
    reference = _reference(rows, weight, group_offsets)
    errors = {}
    for name in recipes:
        output = _output(name, weight, rows, group_offsets, input_amax)
        worst, worst_mere = _worst_group(output, reference, group_offsets)
        errors[name] = RecipeError(
            output=output_error(output, reference),
            worst_group=worst,
            worst_group_floored_mere=worst_mere,
            logits=logits_agreement(output, reference, HEAD_TOP_K) if is_head else None,
            routing=routing_agreement(output, reference, routing.selection_bias, routing.experts_per_token)
            if routing
            else None,
        )
    return errors


def _output(name: str, weight: Tensor, rows: Tensor, group_offsets: Tensor | None, input_amax: float) -> Tensor:
    recipe = RECIPES[name]

    def product(inputs: Tensor, matrix: Tensor) -> Tensor:
        state = recipe.quantize_weight(matrix, input_amax if recipe.needs_input_amax else None)
        return SiteMethod(recipe, state, cache_weight=False)(inputs)

    return _by_pieces(product, weight, rows, group_offsets)


def _reference(rows: Tensor, weight: Tensor, group_offsets: Tensor | None) -> Tensor:
    return _by_pieces(lambda inputs, matrix: inputs @ matrix.float().T, weight, rows, group_offsets)


def _by_pieces(
    product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, rows: Tensor, group_offsets: Tensor | None
) -> Tensor:
    """Products [M, out], some output channels of one group at a time: what is rounded in between stays small."""
    if group_offsets is None:
        return torch.cat([product(rows, piece) for piece in weight.split(PIECE_OUTPUTS)], dim=1)
    bounds = group_offsets.tolist()
    parts = zip(weight, bounds[:-1], bounds[1:], strict=True)
    return torch.cat(
        [_by_pieces(product, matrix, rows[start:end], None) for matrix, start, end in parts if end > start]
    )


def _worst_group(
    output: Tensor, reference: Tensor, group_offsets: Tensor | None
) -> tuple[int, float] | tuple[None, None]:
    if group_offsets is None:
        return None, None
    bounds = group_offsets.tolist()
    by_group = {
        group: output_error(output[start:end], reference[start:end]).floored_mere
        for group, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        if end > start
    }
    worst = max(by_group, key=by_group.__getitem__)
    return worst, by_group[worst]
