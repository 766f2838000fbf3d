"""Activations in the forms that the next sites take, and the kernels that produce several forms at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.engines.hopper.weights import DenseFeedForward, Site, SparseFeedForward
from loka_serve.kernels.batch_invariant import ROUTER, experts_configuration
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.kernels.linear.implementations import linear
from loka_serve.kernels.moe.block import expert_outputs
from loka_serve.kernels.moe.combine import combine, combine_norm_quantize
from loka_serve.kernels.moe.configurations import Configuration
from loka_serve.kernels.moe.routing import Router
from loka_serve.kernels.norm_quantize.triton import residual_norm, residual_norm_both, residual_norm_quantize
from loka_serve.kernels.quantize.triton import BLOCK_SCALES, NO_SCALES, ROW_SCALES, quantize_activation
from loka_serve.kernels.swiglu_quantize.triton import swiglu, swiglu_quantize

SCALES = {"bf16": NO_SCALES, "fp8_row": ROW_SCALES, "fp8_block": BLOCK_SCALES}
"""Which scales the inputs of a site of each recipe carry."""


@dataclass(frozen=True)
class Activation:
    """Rows [M, K] by recipe: bfloat16 with None, or E4M3 codes with their scales."""

    forms: dict[str, tuple[Tensor, Tensor | None]]

    def of(self, recipe: str) -> tuple[Tensor, Tensor | None]:
        return self.forms[recipe]


@dataclass(frozen=True)
class Producers:
    """Makes activations and multiplies them; `fused` quantizes within the producer, otherwise in a further pass.

    A gain of None is a BlockNorm.
    """

    dispatch: Dispatch
    batch_invariant: bool
    eps: float
    fused: bool
    activation: str

    def project(self, activation: Activation, site: Site, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x W^T of a dense site: [M, N]."""
        x, scale = activation.of(site.recipe)
        rows, (n, k) = x.shape[0], site.weight.shape
        op = "linear" if out_dtype == torch.bfloat16 else "linear_float32"
        implementation = self.dispatch.choose(op, site.recipe, n, k, rows)
        return linear(x, scale, site.weight, site.scale, implementation, out_dtype)

    def configure_experts(self, weights: SparseFeedForward, tokens: int) -> Configuration | None:
        """What the table says of both grouped GEMMs; None where it says nothing, and for two GEMMs of two recipes."""
        if self.batch_invariant:
            return experts_configuration(weights.experts)
        if weights.recipe != weights.down_recipe:
            return None
        groups, model, width = weights.experts.down.shape
        return self.dispatch.choose_experts(weights.recipe, width, model, groups, tokens)

    def quantized(self, x: Tensor, recipes: set[str]) -> Activation:
        """A bfloat16 tensor [M, K] in the forms that `recipes` take."""
        forms: dict[str, tuple[Tensor, Tensor | None]] = {}
        for recipe in recipes:
            forms[recipe] = (x, None) if recipe == "bf16" else quantize_activation(x, SCALES[recipe])
        return Activation(forms)

    def norm(
        self, x: Tensor, residual: Tensor | None, gain: Tensor | None, recipes: set[str]
    ) -> tuple[Tensor, Activation]:
        """(x + residual, its norm in the forms that `recipes` take)."""
        quantized = sorted(recipes - {"bf16"})
        if not quantized or not self.fused:
            total, normed = residual_norm(x, residual, gain, self.eps)
            return total, self.quantized(normed, recipes)
        block_scales = quantized[0] == "fp8_block"
        if recipes == {quantized[0]}:
            total, codes, scale = residual_norm_quantize(x, residual, gain, self.eps, block_scales)
            return total, Activation({quantized[0]: (codes, scale)})
        total, normed, codes, scale = residual_norm_both(x, residual, gain, self.eps, block_scales)
        activation = self.quantized(normed, recipes - {quantized[0]})
        return total, Activation({**activation.forms, quantized[0]: (codes, scale)})

    def swiglu(self, gate_up: Tensor, recipe: str) -> Activation:
        """activation(gate) * up of [M, 2 * width] for the site that follows."""
        if recipe == "bf16" or not self.fused:
            return self.quantized(swiglu(gate_up, activation=self.activation), {recipe})
        return Activation({recipe: swiglu_quantize(gate_up, recipe == "fp8_block", activation=self.activation)})

    def dense(self, weights: DenseFeedForward, normed: Activation) -> Tensor:
        """A dense feed-forward: bfloat16 [M, d_model]."""
        gate_up = self.project(normed, weights.gate_up)
        return self.project(self.swiglu(gate_up, weights.down.recipe), weights.down)

    def experts(
        self, weights: SparseFeedForward, normed: Activation
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """What `combine` adds up: outputs of the experts with positions and weights, and the shared expert's, if apart.

        Args:
            normed: in the forms of `input_recipes`.
        """
        logits: Tensor | Router
        if weights.router.recipe == "bf16":
            logits = Router(normed.of("bf16")[0], weights.router.weight)
        else:
            logits = self.project(normed, weights.router, torch.float32)
        rows, scale = normed.of(weights.recipe)
        measured, tiling = self.configure_experts(weights, len(rows)), ROUTER if self.batch_invariant else None
        outputs = expert_outputs(
            rows, scale, logits, weights.selection_bias, weights.experts, weights.top_k, measured, tiling
        )
        return outputs, None if weights.shared is None else self.dense(weights.shared, normed)

    def combine_norm(
        self,
        experts: tuple[Tensor, Tensor, Tensor],
        shared: Tensor | None,
        residual: Tensor,
        gain: Tensor | None,
        recipe: str,
    ) -> tuple[Tensor, Activation]:
        """Expert outputs, shared expert and residual added up, and the sum's norm for the site that follows."""
        outputs, positions, weights = experts
        if not self.fused or gain is None:  # the fused kernel knows no BlockNorm
            total = combine(outputs, positions, weights, shared, residual)
            return self.norm(total, None, gain, {recipe})
        total, normed, scale = combine_norm_quantize(
            outputs, positions, weights, gain, self.eps, SCALES[recipe], shared, residual
        )
        return total, Activation({recipe: (normed, None if recipe == "bf16" else scale)})


def input_recipes(feed_forward: DenseFeedForward | SparseFeedForward) -> set[str]:
    """Forms of its input that a feed-forward takes."""
    if isinstance(feed_forward, DenseFeedForward):
        return {feed_forward.gate_up.recipe}
    recipes = {feed_forward.router.recipe, feed_forward.recipe}
    return recipes if feed_forward.shared is None else recipes | {feed_forward.shared.gate_up.recipe}
