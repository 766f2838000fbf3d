"""The two grouped GEMMs by DeepGEMM, which is optional. It takes rows in order and leaves the activation to others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..linear.libraries import deep_gemm
from .reference import SortedRows
from .sorted_rows import gather_rows, group_ends, row_experts, sorted_swiglu

BLOCK_M = 128  # rows of its tiles, which the groups are padded to


@dataclass(frozen=True)
class DeepGemm:
    """A grouped GEMM by DeepGEMM; block scales or bfloat16.

    Attributes:
        ends: it is told where each expert's rows end, and visits no further blocks. Otherwise it is told every row's
            expert, -1 in padding: it then loads and stores unneeded blocks too, without computing them.
    """

    ends: bool = True

    @property
    def block_m(self) -> int:
        return BLOCK_M


def deep_gemm_takes(weight_scale: Tensor | None, weight: Tensor) -> bool:
    """Whether the library is here and takes such weights: fp8_block or bfloat16, whole 128-byte lines, on Hopper."""
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) != (9, 0):
        return False
    whole = weight.shape[1] % 64 == 0 and weight.shape[2] % 128 == 0
    return whole and (weight_scale is None or weight_scale.ndim == 3) and deep_gemm() is not None


def with_groups(rows: SortedRows, experts: int, implementation: DeepGemm) -> SortedRows:
    """The same rows with `groups` as the implementation takes them: int32 [experts] or [padded rows]."""
    groups = group_ends(rows, experts) if implementation.ends else row_experts(rows)
    return replace(rows, groups=groups)


def deep_gemm_swiglu(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: SortedRows,
    implementation: DeepGemm,
    quantize: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `experts.gate_up_swiglu`; gate and up are rounded to bfloat16 before they are activated.

    Raises:
        RuntimeError: the library is not here.
        ValueError: the operands carry a scale a row, which it does not take.
    """
    gathered, gathered_scale = gather_rows(x, scale, rows)
    gate_up = deep_gemm_linear(gathered, gathered_scale, weight, weight_scale, rows, implementation)
    return sorted_swiglu(gate_up, rows, quantize)


def deep_gemm_linear(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: SortedRows,
    implementation: DeepGemm,
) -> Tensor:
    """As `experts.expert_linear`; errors as of `deep_gemm_swiglu`. Block scales are read in place if column-major."""
    library = deep_gemm()
    if library is None:
        raise RuntimeError("deep_gemm is not installed, or does not import here")
    if scale is not None and scale.ndim == 1:
        raise ValueError("scale: deep_gemm takes block scales or none, got a scale a row")
    if rows.groups is None:
        rows = with_groups(rows, len(weight), implementation)
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)
    if not len(out):
        return out
    more = {"use_psum_layout": True} if implementation.ends else {}
    if scale is None or weight_scale is None:
        library.m_grouped_bf16_gemm_nt_contiguous(x, weight, out, rows.groups, **more)
    else:
        library.m_grouped_fp8_gemm_nt_contiguous((x, scale), (weight, weight_scale), out, rows.groups, **more)
    return out
