"""Every way to compute a dense linear, by name: `linear` runs one, `implementations_for` says which can run.

`reference` (any device), `torch` and, for scales a row or a tensor, `torch_fast`, `deep_gemm`, what further libraries
give (see `adapters`), `triton_<rows>x<columns>` (the tiles of a program of `triton.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantize.reference import BLOCK
from . import reference
from .adapters import ADAPTERS, Problem, adapter_of

RECIPES = ("bf16", "fp8_row", "fp8_block")
"""What the hopper engine serves."""
MEASURED_RECIPES = (*RECIPES, "fp8_tensor")
"""What linears are computed in; one scale a tensor, for inputs as for weights, is there to be compared with."""
OUT_DTYPES = (torch.bfloat16, torch.float32)
IMPLEMENTATIONS = ("reference", *(name for adapter in ADAPTERS for name in adapter.implementations))
"""Every name that there is, whatever can run here."""


def linear(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    implementation: str,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x times the transposed weight with float32 accumulation, rounded once: [M, N] of `out_dtype`.

    Args:
        x: contiguous [M, K]: bfloat16 without `scale`, or E4M3 with float32 `scale` [M] (fp8_row) or
            [M, ceil(K / 128)] (fp8_block; any strides, read in place when laid out as by `allocate_scales`) or []
            (fp8_tensor).
        weight: contiguous [N, K] of the type of x.
        weight_scale: float32 [N], [ceil(N / 128), ceil(K / 128)] or []; in the layout of `weight_scale_for` it is read
            in place, otherwise some implementations copy it first.
        implementation: one of `implementations_for`.
        out_dtype: torch.bfloat16, or torch.float32, which deep_gemm (for fp8_block) does not give.

    Raises:
        ValueError: for operands that do not fit together, an unknown implementation, or one that cannot do this.
        RuntimeError: where a library refuses the shape.
    """
    recipe = _check(x, scale, weight, weight_scale, out_dtype)
    if not len(x):
        return x.new_empty(0, weight.shape[0], dtype=out_dtype)
    if implementation == "reference":
        return reference.linear(x, scale, weight, weight_scale).to(out_dtype)
    adapter = adapter_of(implementation)
    if adapter is not None:
        return adapter.run(implementation, x, scale, weight, weight_scale, out_dtype)
    raise ValueError(f"implementation: no {implementation!r} for {recipe}")


def implementations_for(
    recipe: str,
    rows: int,
    n: int,
    k: int,
    device: torch.device | str,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[str, ...]:
    """Names of what can run these shapes on this device and is worth trying at so many rows, libraries first.

    Raises ValueError for an unknown recipe.
    """
    if recipe not in MEASURED_RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(MEASURED_RECIPES)}, got {recipe!r}")
    device = torch.device(device)
    if device.type != "cuda":
        return ("reference",)
    problem = Problem(recipe, rows, n, k, out_dtype, torch.cuda.get_device_capability(device))
    names = (name for adapter in ADAPTERS for name in adapter.implementations if adapter.takes(name, problem))
    return tuple(names) or ("reference",)


def default_implementation(
    recipe: str, rows: int, n: int, k: int, device: torch.device | str, out_dtype: torch.dtype = torch.bfloat16
) -> str:
    """What to run unmeasured: torch, or a Triton tiling where torch cannot; the reference without a GPU."""
    return implementations_for(recipe, rows, n, k, device, out_dtype)[0]


def weight_scale_for(implementation: str, weight_scale: Tensor | None) -> Tensor | None:
    """The scales of a weight laid out so that the implementation reads them in place; for load time.

    All implementations take all layouts, but torch pads unpadded block scales, and DeepGEMM unpads
    padded ones, at every call.
    """
    if weight_scale is None or weight_scale.ndim < 2:
        return weight_scale
    adapter = adapter_of(implementation)
    return weight_scale.contiguous() if adapter is None else adapter.weight_scale(weight_scale)


def recipe_of(scale: Tensor | None) -> str:
    """The recipe that an activation's scales belong to."""
    return "bf16" if scale is None else ("fp8_tensor", "fp8_row", "fp8_block")[scale.ndim]


def _check(x: Tensor, scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None, out_dtype: torch.dtype) -> str:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x, weight: expected [M, K] and [N, K], got {list(x.shape)} and {list(weight.shape)}")
    rows, inner = x.shape
    channels = weight.shape[0]
    dtype = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous {dtype}, got {tensor.dtype} of strides {tensor.stride()}")
    expected: tuple[list[int] | None, list[int] | None] = (None, None)
    if scale is not None:
        k_blocks = -(-inner // BLOCK)
        expected = ([], []) if scale.ndim == 0 else ([rows], [channels])
        if scale.ndim == 2:
            expected = ([rows, k_blocks], [-(-channels // BLOCK), k_blocks])
    found = tuple(None if given is None else list(given.shape) for given in (scale, weight_scale))
    if found != expected or (weight_scale is not None and not _rows_contiguous(weight_scale)):
        raise ValueError(
            f"scale, weight_scale: expected shapes {expected}, rows contiguous for the weight, got {found}"
        )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype: expected bfloat16 or float32, got {out_dtype}")
    return recipe_of(scale)


def _rows_contiguous(weight_scale: Tensor) -> bool:
    return weight_scale.ndim == 0 or weight_scale.shape[-1] == 1 or weight_scale.stride(-1) == 1
