"""Random levels of a trie with beams on them, shared by the tests here and those on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loka_serve.kernels.level_head.reference import AllowedNodes, TrieLevel, pack_allowed


@dataclass
class Case:
    """Arguments of `score_candidates`."""

    logits: Tensor
    parent_scores: Tensor | None
    beam_counts: Tensor
    children: TrieLevel | None
    nodes: Tensor | None
    allowed: AllowedNodes | None

    def arguments(self) -> tuple[Tensor, Tensor | None, Tensor, TrieLevel | None, Tensor | None, AllowedNodes | None]:
        return self.logits, self.parent_scores, self.beam_counts, self.children, self.nodes, self.allowed


def make_level(parents: int, codes: int, most_children: int, device: str, seed: int) -> TrieLevel:
    """Between 0 and `most_children` children below each parent."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, min(most_children, codes) + 1, parents)
    chosen = [np.sort(generator.choice(codes, count, replace=False)) for count in counts]
    first = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    every = np.concatenate([*chosen, np.empty(0, np.int64)]).astype(np.int32)
    return TrieLevel(torch.from_numpy(first).to(device), torch.from_numpy(every).to(device))


def make_allowed(requests: int, nodes: int, device: str, seed: int) -> AllowedNodes:
    """Every other request filtered, from all to nothing allowed; bits of the others are garbage."""
    generator = np.random.default_rng(seed)
    share = generator.random((requests, 1))
    share[0] = 0
    rows = [pack_allowed(row) for row in generator.random((requests, nodes)) < share]
    filtered = (torch.arange(requests) + 1) % 2
    return AllowedNodes(torch.from_numpy(np.stack(rows)).to(device), filtered.int().to(device))


def make_case(
    batch: int,
    beams: int,
    codes: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    children: int | None = None,
    filters: bool = False,
    parents: int = 50,
    seed: int = 0,
) -> Case:
    """`children`: the most below one node, None without a trie. One request has all its beams, another none."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch * beams, codes, generator=generator) * 3).to(dtype).to(device)
    counts = torch.randint(0, beams + 1, (batch,), generator=generator, dtype=torch.int32)
    counts[-1], counts[0] = 0, beams
    scores = -torch.rand(batch, beams, generator=generator) * 9
    level, nodes, allowed = None, None, None
    if children is not None:
        level = make_level(parents, codes, children, device, seed)
        nodes = torch.randint(0, parents, (batch, beams), generator=generator, dtype=torch.int32)
        nodes[torch.arange(beams) >= counts[:, None]] = -1  # as of dead beams
        if filters:
            allowed = make_allowed(batch, len(level.codes), device, seed)
    scores[torch.arange(beams) >= counts[:, None]] = float("-inf")
    return Case(
        logits, scores.to(device), counts.to(device), level, None if nodes is None else nodes.to(device), allowed
    )


def with_distinct_nodes(case: Case, seed: int = 0) -> Case:
    """The same with live beams on different nodes in order, as those of a search are."""
    assert case.children is not None and case.nodes is not None
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.full_like(case.nodes, -1)
    for request, count in enumerate(case.beam_counts.tolist()):
        chosen = torch.randperm(len(case.children.first_child) - 1, generator=generator)[:count]
        nodes[request, :count] = chosen.sort().values.int().to(nodes.device)
    return replace(case, nodes=nodes)
