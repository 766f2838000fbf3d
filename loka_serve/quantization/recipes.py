"""The precision recipes: how a site's inputs and weight are rounded, one strategy class each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from loka_serve.errors import QuantizationError
from loka_serve.kernels.quantize.reference import (
    BLOCK,
    expand_row_blocks,
    quantize_row_blocks_e4m3,
    quantize_rows_e4m3,
    quantize_rows_int8,
    quantize_static_e4m3,
    quantize_tiles_e4m3,
    static_scale_e4m3,
)
from loka_serve.quantization.methods import SiteMethod
from loka_serve.quantization.scaled_matmul import ScaledMatmulMethod, supports_scaled_matmul

State = dict[str, Tensor]
"""A site's quantized weight: ``weight`` in the recipe's storage dtype, and its scales."""


class Recipe(ABC):
    """How a GEMM computes; weights are ``[out, in]``, or ``[groups, out, in]`` for grouped sites.

    Attributes:
        name: as in plans, bundles and command lines.
        storage: dtype of the stored weight.
        needs_input_amax: whether `quantize_weight` needs the largest input magnitude seen in calibration.
    """

    name: str
    storage: torch.dtype
    needs_input_amax = False

    def quantize_weight(self, weight: Tensor, input_amax: float | None = None) -> State:
        """Round a float weight; the result is what a bundle stores, as ``{site}.{key}``.

        Raises:
            QuantizationError: a weight with NaN or infinity; a missing or useless `input_amax` where one is needed.
        """
        check_finite(weight)
        if self.needs_input_amax and (input_amax is None or not math.isfinite(input_amax) or input_amax < 0):
            raise QuantizationError(
                f"{self.name} needs the calibrated input amax, a finite number >= 0: found {input_amax}"
            )
        if weight.ndim == 2:
            return self._quantize_matrix(weight, input_amax)
        # Group by group, so that the float32 copies in between are one group's.
        state = {
            key: torch.empty(shape, dtype=dtype, device=weight.device)
            for key, (dtype, shape) in self.state_shapes(tuple(weight.shape)).items()
        }
        for group, matrix in enumerate(weight):
            for key, tensor in self._quantize_matrix(matrix, input_amax).items():
                (state[key][group] if tensor.ndim else state[key]).copy_(tensor)
        return state

    @abstractmethod
    def _quantize_matrix(self, weight: Tensor, input_amax: float | None) -> State:
        """`quantize_weight` of a checked ``[out, in]`` weight."""

    @abstractmethod
    def state_shapes(self, weight_shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor that `quantize_weight` gives for a weight of this shape."""

    @abstractmethod
    def dequantize_weight(self, state: Mapping[str, Tensor]) -> Tensor:
        """The float32 weight that the stored codes stand for. Accepts one group's slice of a grouped state."""

    @abstractmethod
    def round_inputs(self, inputs: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Quantize and dequantize inputs ``[M, in]``: the float32 values that enter the GEMM."""

    def prepare(self, state: State, device: torch.device | str = "cpu", cache_weight: bool = True) -> SiteMethod:
        """The callable that takes a site over; it owns the tensors it runs on.

        Args:
            state: from `quantize_weight` or a bundle.
            cache_weight: keep a float32 copy of the dequantized weight instead of the codes (fast), or dequantize at
                every call (four times less memory for FP8). Ignored where a GPU kernel reads the codes themselves.
        """
        device = torch.device(device)
        state = {key: tensor.to(device) for key, tensor in state.items()}
        if supports_scaled_matmul(self.name, state["weight"]):
            return ScaledMatmulMethod(self, state)
        return SiteMethod(self, state, cache_weight)


class Bf16Recipe(Recipe):
    """Inputs and weights rounded to bfloat16."""

    name = "bf16"
    storage = torch.bfloat16

    def _quantize_matrix(self, weight: Tensor, input_amax: float | None) -> State:
        return {"weight": weight.bfloat16()}

    def state_shapes(self, weight_shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (self.storage, weight_shape)}

    def dequantize_weight(self, state: Mapping[str, Tensor]) -> Tensor:
        return state["weight"].bfloat16().float()

    def round_inputs(self, inputs: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return inputs.bfloat16().float()


class _ChannelScaledRecipe(Recipe):
    """Weights with one scale for each output channel."""

    def state_shapes(self, weight_shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (self.storage, weight_shape), "weight_scale": (torch.float32, weight_shape[:-1])}

    def dequantize_weight(self, state: Mapping[str, Tensor]) -> Tensor:
        return state["weight"].float().mul_(state["weight_scale"].unsqueeze(-1))


class Fp8RowRecipe(_ChannelScaledRecipe):
    """E4M3, one dynamic scale a token and one scale an output channel."""

    name = "fp8_row"
    storage = torch.float8_e4m3fn

    def _quantize_matrix(self, weight: Tensor, input_amax: float | None) -> State:
        codes, scale = quantize_rows_e4m3(weight)
        return {"weight": codes, "weight_scale": scale}

    def round_inputs(self, inputs: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        codes, scale = quantize_rows_e4m3(inputs)
        return codes.float() * scale.unsqueeze(-1)


class Fp8TensorRecipe(_ChannelScaledRecipe):
    """E4M3, one static scale for all inputs (calibrated) and one scale an output channel, as TensorRT's Q/DQ.

    Inputs beyond the calibrated amax saturate.
    """

    name = "fp8_tensor"
    storage = torch.float8_e4m3fn
    needs_input_amax = True

    def _quantize_matrix(self, weight: Tensor, input_amax: float | None) -> State:
        assert input_amax is not None  # checked by quantize_weight
        codes, scale = quantize_rows_e4m3(weight)
        input_scale = static_scale_e4m3(input_amax).to(weight.device)
        return {"weight": codes, "weight_scale": scale, "input_scale": input_scale}

    def state_shapes(self, weight_shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {**super().state_shapes(weight_shape), "input_scale": (torch.float32, ())}

    def round_inputs(self, inputs: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        scale = state["input_scale"]
        return quantize_static_e4m3(inputs, scale).float() * scale


class Fp8BlockRecipe(Recipe):
    """E4M3, one dynamic scale for each 1 x 128 of the inputs and one scale for each 128 x 128 of the weight."""

    name = "fp8_block"
    storage = torch.float8_e4m3fn

    def _quantize_matrix(self, weight: Tensor, input_amax: float | None) -> State:
        codes, scale = quantize_tiles_e4m3(weight)
        return {"weight": codes, "weight_scale": scale}

    def state_shapes(self, weight_shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        *groups, rows, columns = weight_shape
        tiles = (*groups, -(-rows // BLOCK), -(-columns // BLOCK))
        return {"weight": (self.storage, weight_shape), "weight_scale": (torch.float32, tiles)}

    def dequantize_weight(self, state: Mapping[str, Tensor]) -> Tensor:
        weight = state["weight"].float()
        scale = expand_row_blocks(state["weight_scale"], weight.shape[-1])
        # In place, a row of tiles at a time: no second and third tensor of the weight's size in float32.
        for tiles, start in enumerate(range(0, weight.shape[-2], BLOCK)):
            weight[..., start : start + BLOCK, :].mul_(scale[..., tiles, None, :])
        return weight

    def round_inputs(self, inputs: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        codes, scale = quantize_row_blocks_e4m3(inputs)
        return codes.float() * expand_row_blocks(scale, inputs.shape[-1])


class Int8RowRecipe(_ChannelScaledRecipe):
    """INT8, one dynamic scale a token and one scale an output channel; for comparison with FP8."""

    name = "int8_row"
    storage = torch.int8

    def _quantize_matrix(self, weight: Tensor, input_amax: float | None) -> State:
        codes, scale = quantize_rows_int8(weight)
        return {"weight": codes, "weight_scale": scale}

    def round_inputs(self, inputs: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        codes, scale = quantize_rows_int8(inputs)
        return codes.float() * scale.unsqueeze(-1)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (Bf16Recipe(), Fp8TensorRecipe(), Fp8RowRecipe(), Fp8BlockRecipe(), Int8RowRecipe())
}


def recipe_by_name(name: str) -> Recipe:
    """Raises QuantizationError for an unknown name."""
    try:
        return RECIPES[name]
    except KeyError:
        raise QuantizationError(f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}") from None


def check_finite(weight: Tensor) -> None:
    """Raises QuantizationError if a weight holds NaN or infinity."""
    # NaN passes through aminmax; unlike isfinite().all() it makes no mask of the weight's size.
    if not all(math.isfinite(bound.item()) for bound in torch.aminmax(weight)):
        raise QuantizationError("the weight holds NaN or infinity: expected finite numbers")
