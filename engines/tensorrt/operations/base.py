"""What computes nodes of domain `loka`; shapes are those of the kernels' references."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from loka_serve.kernels.level_head.reference import AdvancedBeams, AllowedNodes, TrieLevel


class Operations(Protocol):
    """The operations of one model, with the weights that they need.

    Attributes:
        dtype: of activations.
        weight_bytes: of the weights that it holds.
    """

    dtype: torch.dtype
    weight_bytes: int

    def embed_context(self, history: Tensor, lengths: Tensor, features: Tensor) -> Tensor:
        """[batch * (1 + items), d_model]; lengths of 0 where there is no request."""
        ...

    def rotate_keys(self, keys: Tensor, theta: float) -> Tensor:
        """keys [batch, slots, groups, head_dim] by the position of their slot."""
        ...

    def context_form(self, keys: Tensor, values: Tensor, slots: Tensor) -> Any:
        """Keys and values as `beam_attention` takes them, made once a request."""
        ...

    def beam_attention(
        self, query: Tensor, context: Any, lengths: Tensor, slots: Tensor, counts: Tensor, theta: float
    ) -> Tensor:
        """Attention of beams over their request's context.

        Args:
            query: [batch, beams, heads, head_dim], turned by the position `lengths` first if `theta` is not 0.
            slots: int32 [batch], visible slots.
            counts: int32 [batch], live beams.
        """
        ...

    def self_attention(
        self,
        qkv: Tensor,
        cache: tuple[Tensor, Tensor],
        ancestors: Tensor | None,
        counts: Tensor,
        level: int,
    ) -> Tensor:
        """As `kernels.self_attention.reference.self_attention`; fills the cache."""
        ...

    def experts(self, layer: int, normed: Tensor, residual: Tensor) -> Tensor:
        """residual + the layer's mixture of experts, rows [M, d_model]."""
        ...

    def select(
        self,
        logits: Tensor,
        beams: AdvancedBeams | None,
        counts: Tensor,
        children: TrieLevel | None,
        allowed: AllowedNodes | None,
        widths: Tensor,
        k: int,
        capacity: int | None,
        is_last: bool,
    ) -> AdvancedBeams:
        """The best k beams of each request, as `engines.hopper.selection.select`."""
        ...

    def extend_ancestors(self, previous: Tensor | None, parents: Tensor) -> Tensor:
        """As `kernels.self_attention.reference.extend_ancestors`."""
        ...
