"""Layers shared by the reference models: linear sites, norms, attention, SwiGLU and the sparse mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_BLOCK = 256
"""Channels that a BlockNorm normalises together."""


class LinearMethod(Protocol):
    """How a linear site computes, once a recipe has taken over its weight."""

    def __call__(self, x: Tensor) -> Tensor: ...


class GroupedLinearMethod(Protocol):
    """As `LinearMethod`, for rows that are sorted by group."""

    def __call__(self, x: Tensor, group_offsets: Tensor) -> Tensor: ...


class Linear(nn.Module):
    """A GEMM site: y = x W^T, W of shape [out, in]; with `bias`, float or lower [out], added to the product.

    `method`, when set, replaces the product (the weight is then dropped); `observer`, when set, sees the input first as
    rows [M, in]. A site's name is its module path in the model, `layers.3.mlp.down` for example.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.method: LinearMethod | None = None
        self.observer: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(x.reshape(-1, self.in_features))
        if self.method is not None:
            product = self.method(x)
        else:
            assert self.weight is not None
            product = F.linear(x, self.weight)
        return product if self.bias is None else (product.float() + self.bias.float()).to(product.dtype)


class GroupedLinear(nn.Module):
    """A grouped GEMM site: rows of group g are multiplied by W[g], W of shape [groups, out, in].

    Rows come sorted by group; `group_offsets` is int64 [groups + 1], group g owns rows offsets[g] to offsets[g + 1].
    """

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.method: GroupedLinearMethod | None = None
        self.observer: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, x: Tensor, group_offsets: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(x, group_offsets)
        if self.method is not None:
            return self.method(x, group_offsets)
        assert self.weight is not None
        return grouped_linear(x, self.weight, group_offsets)


def grouped_linear(x: Tensor, weight: Tensor, group_offsets: Tensor) -> Tensor:
    """Row-sorted grouped product, one GEMM a non-empty group; x [M, in], weight [groups, out, in] -> [M, out]."""
    bounds = group_offsets.tolist()
    parts = [
        F.linear(x[start:end], weight[group])
        for group, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        if end > start
    ]
    return torch.cat(parts) if parts else x.new_empty(0, weight.shape[1])


class Embedding(nn.Module):
    """A lookup table [rows, width]. Left uninitialised: torch's own fills it at once, slowly on the meta device."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class BlockNorm(nn.Module):
    """Parameter-free RMSNorm over blocks of 256 channels, the last one with what remains (LoKA, arXiv 2605.10886).

    Trained in: no gain can make an outlier channel, and a large value takes precision from its own block alone.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.float().split(NORM_BLOCK, dim=-1)
        return torch.cat([F.rms_norm(block, block.shape[-1:], None, self.eps) for block in blocks], -1).to(x.dtype)


def make_norm(kind: str, width: int, eps: float) -> RMSNorm | BlockNorm:
    """A norm by its name in the configuration: `rms` or `block`."""
    return BlockNorm(width, eps) if kind == "block" else RMSNorm(width, eps)


class SwiGLU(nn.Module):
    """down(activation(gate) * up), gate and up fused into one site (arXiv 2002.05202)."""

    def __init__(self, d_model: int, width: int, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = Linear(d_model, 2 * width, bias)
        self.down = Linear(width, d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x), self.activation))


def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up of a fused [..., 2 * width] tensor whose first half is the gate.

    `hard_swish` is x * relu6(x + 3) / 6 (arXiv 1905.02244), which needs no exponential and is 0 below -3.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.hardswish(gate) if activation == "hard_swish" else F.silu(gate)) * up


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position encoding (arXiv 2104.09864), halves layout.

    Args:
        x: [..., heads, head_dim].
        positions: [...], one a row of `x`; any integer or float dtype.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class SparseMoE(nn.Module):
    """Sparse mixture of experts with a shared expert.

    Sigmoid scores; a bias that only steers which experts are selected, which balances load without an auxiliary loss
    (arXiv 2408.15664); the selected scores are normalised to sum to 1.

    With `dense` set, every expert runs on every row: no sort and no host synchronisation, for training small models.
    """

    def __init__(
        self,
        d_model: int,
        experts: int,
        experts_per_token: int,
        width: int,
        shared_experts: int,
        activation: str = "silu",
        shared_bias: bool = False,
    ) -> None:
        super().__init__()
        self.experts, self.experts_per_token, self.activation = experts, experts_per_token, activation
        self.router = Linear(d_model, experts)
        self.selection_bias = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.gate_up = GroupedLinear(experts, d_model, 2 * width)
        self.down = GroupedLinear(experts, width, d_model)
        self.shared = SwiGLU(d_model, shared_experts * width, activation, shared_bias) if shared_experts else None
        self.dense = False

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their weights for each row of x [M, d]: int64 [M, k] and float32 [M, k]. Ties: lower expert."""
        scores = torch.sigmoid(self.router(x).float())
        ranked = torch.sort(scores + self.selection_bias.float(), dim=-1, descending=True, stable=True).indices
        selected = ranked[:, : self.experts_per_token]
        weights = scores.gather(1, selected)
        return selected, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        selected, weights = self.route(rows)
        mix = self._dense_experts if self.dense else self._selected_experts
        out = mix(rows, selected, weights).to(x.dtype)
        if self.shared is not None:
            out = out + self.shared(rows)
        return out.reshape(x.shape)

    def _selected_experts(self, rows: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        flat = selected.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts)
        offsets = F.pad(counts.cumsum(0), (1, 0))
        hidden = swiglu(self.gate_up(rows[order // self.experts_per_token], offsets), self.activation)
        outputs = self.down(hidden, offsets)
        # Back in token order first: a sum over k in a fixed order is deterministic, a scatter-add is not.
        unsorted = torch.empty_like(outputs)
        unsorted[order] = outputs
        per_token = unsorted.view(rows.shape[0], self.experts_per_token, -1)
        return (per_token.float() * weights[..., None]).sum(1)

    def _dense_experts(self, rows: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        assert self.gate_up.weight is not None and self.down.weight is not None
        gates = torch.zeros(rows.shape[0], self.experts, device=rows.device).scatter(1, selected, weights)
        hidden = swiglu(torch.einsum("md,efd->mef", rows, self.gate_up.weight), self.activation)
        return torch.einsum("mef,edf->md", hidden * gates[..., None].to(hidden.dtype), self.down.weight)
