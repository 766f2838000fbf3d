"""FP8 sites on a CUDA device through torch's scaled GEMMs (cuBLASLt and CUTLASS underneath)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka_serve.kernels.quantize.reference import quantize_rows_e4m3, quantize_static_e4m3
from loka_serve.quantization.methods import SiteMethod

if TYPE_CHECKING:
    from loka_serve.quantization.recipes import Recipe

ALIGNMENT = 16
"""torch._scaled_mm takes inner and outer widths that are multiples of 16."""


def supports_scaled_matmul(recipe: str, weight: Tensor) -> bool:
    """Whether `ScaledMatmulMethod` can run this site: fp8_row or fp8_tensor, widths multiples of 16, FP8 tensor cores.

    Grouped weights additionally need compute capability 9.0, where torch's grouped FP8 GEMM runs.
    """
    if weight.device.type != "cuda" or recipe not in ("fp8_row", "fp8_tensor"):
        return False
    if weight.shape[-1] % ALIGNMENT or weight.shape[-2] % ALIGNMENT:
        return False
    capability = torch.cuda.get_device_capability(weight.device)
    return capability == (9, 0) if weight.ndim == 3 else capability >= (8, 9)


class ScaledMatmulMethod(SiteMethod):
    """E4M3 codes straight into the tensor cores, FP32 accumulation, the result rounded to bfloat16.

    That last rounding, then a cast to x's dtype, is how it differs from `SiteMethod`, which gives float32 sums.
    """

    backend = "torch._scaled_mm"

    def __init__(self, recipe: Recipe, state: dict[str, Tensor]) -> None:
        super().__init__(recipe, state, cache_weight=False)
        self.grouped = state["weight"].ndim == 3
        if self.grouped:
            self.backend = "torch._scaled_grouped_mm"
        self._weight_scale = state["weight_scale"].contiguous()

    def __call__(self, x: Tensor, group_offsets: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        codes, scale = self._quantize(rows)
        weight = self.state["weight"].transpose(-2, -1)
        if group_offsets is None:
            product = torch._scaled_mm(
                codes, weight, scale[:, None], self._weight_scale[None, :], out_dtype=torch.bfloat16
            )
        else:
            product = torch._scaled_grouped_mm(
                codes,
                weight,
                scale,
                self._weight_scale,
                offs=group_offsets[1:].to(torch.int32),
                out_dtype=torch.bfloat16,
            )
        return product.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.recipe.name == "fp8_row":
            return quantize_rows_e4m3(rows)
        scale = self.state["input_scale"]
        # A row-scaled GEMM with one scale repeated: it allows the weight's scale an output channel.
        return quantize_static_e4m3(rows, scale), scale.expand(rows.shape[0]).contiguous()
