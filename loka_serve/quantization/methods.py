"""The portable way a site runs its recipe: dequantized-exact arithmetic in float32, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from loka_serve.quantization.recipes import Recipe


class SiteMethod:
    """Rounds the inputs as the recipe says and multiplies by the dequantized weight with float32 accumulation.

    Products of two codes are exact in float32, so this is the recipe's definition up to the order of summation and the
    float32 rounding of each scale. Serves linear sites (call with x) and grouped ones (call with x and group_offsets).

    Attributes:
        backend: says how the site runs, for reports: ``dequantized float32``.
        state: the stored tensors; the weight's codes are dropped when a float32 copy is kept instead.
    """

    backend = "dequantized float32"

    def __init__(self, recipe: Recipe, state: dict[str, Tensor], cache_weight: bool) -> None:
        self.recipe = recipe
        weight = state["weight"]
        self.out_features, self.in_features = weight.shape[-2:]
        self.state = dict(state)
        self._dequantized: Tensor | None = None
        if cache_weight:
            self._dequantized = self._dequantize_all()
            del self.state["weight"]

    def __call__(self, x: Tensor, group_offsets: Tensor | None = None) -> Tensor:
        """x ``[..., in]`` to ``[..., out]`` in x's dtype; with `group_offsets`, x ``[M, in]`` sorted by group."""
        inputs = self.recipe.round_inputs(x.reshape(-1, self.in_features), self.state)
        if group_offsets is None:
            return F.linear(inputs, self._weight()).to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        output = torch.empty(inputs.shape[0], self.out_features, dtype=torch.float32, device=x.device)
        bounds = group_offsets.tolist()
        for group, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if end > start:
                torch.mm(inputs[start:end], self._weight(group).T, out=output[start:end])
        return output.to(x.dtype)

    def dequantized_weight(self) -> Tensor:
        """The float32 weight that the site multiplies by, [out, in] or [groups, out, in]."""
        return self._dequantize_all() if self._dequantized is None else self._dequantized

    def _weight(self, group: int | None = None) -> Tensor:
        if self._dequantized is not None:
            return self._dequantized if group is None else self._dequantized[group]
        if group is None:
            return self.recipe.dequantize_weight(self.state)
        one_group = {key: tensor[group] if tensor.ndim else tensor for key, tensor in self.state.items()}
        return self.recipe.dequantize_weight(one_group)

    def _dequantize_all(self) -> Tensor:
        codes = self.state["weight"]
        if codes.ndim == 2:
            return self._weight()
        weight = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for group in range(len(codes)):  # so that what is in between is one group's
            weight[group] = self._weight(group)
        return weight
