"""What the kernels' tensors must look like."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import AllowedNodes, TrieLevel

MAX_BEAMS = 1024


def check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> None:
    """Raise ValueError unless the tensor is contiguous and of that shape and type."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )


def check_children(children: TrieLevel | None, nodes: Tensor | None, batch: int, beams: int) -> None:
    """Raise ValueError unless there is no trie, or one with nodes int32 [batch, beams]."""
    if children is None:
        return
    check("children.first_child", children.first_child, (children.first_child.numel(),))
    check("children.codes", children.codes, (children.codes.numel(),))
    if nodes is None:
        raise ValueError("nodes: expected the beams' nodes, since there are children")
    check("nodes", nodes, (batch, beams))


def check_prefix(prefix: Tensor, children: TrieLevel | None, batch: int, beams: int) -> None:
    """Raise ValueError unless this is where the children of each of 1 to 1024 beams begin in a compact table."""
    check("prefix", prefix, (batch, beams + 1))
    if children is None:
        raise ValueError("prefix: a compact table needs the trie's children")
    if not 0 < beams <= MAX_BEAMS:
        raise ValueError(f"prefix: {beams} beams, expected 1 to {MAX_BEAMS} for a compact table")


def check_allowed(allowed: AllowedNodes | None, children: TrieLevel | None, batch: int) -> None:
    """Raise ValueError unless there are no filters, or some of the right shape and a trie."""
    if allowed is None:
        return
    if children is None:
        raise ValueError("allowed: filters need the trie's children")
    check("allowed.filtered", allowed.filtered, (batch,))
    words = -(-len(children.codes) // 32)
    bits = allowed.bits
    if bits.dtype != torch.int32 or bits.ndim != 2 or len(bits) != batch or bits.shape[1] < words:
        raise ValueError(f"allowed.bits: expected int32 [{batch}, at least {words}], got {bits.dtype} {bits.shape}")
    if bits.stride(1) != 1 and bits.shape[1] > 1:
        raise ValueError("allowed.bits: expected contiguous words")
