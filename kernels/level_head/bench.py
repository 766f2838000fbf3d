"""Scoring and selection of a level's candidates against PyTorch with a dense mask of legal ones, built beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..benchmarking import KernelRow, copies_beyond_l2, make_row, time_us
from . import reference
from .reference import AdvancedBeams, AllowedNodes, TrieLevel, compact_capacity
from .select import score_level, select_level
from .triton import score_candidates
from .triton_advance import advance_beams

CODES, K = 8192, 512
BATCHES = (1, 8, 32)
ITEMS = 10_000_000
# Of semantic IDs: parents of a level, its nodes on top of one for each parent, and the power of a uniform number that
# gives the parent of one of these, and of a beam: 1 for random IDs; with 4, half of the items are below 1 parent in 16.
LEVELS = {
    "1200 children": (CODES, ITEMS - CODES, 1),
    "1 or 2 children": (ITEMS, ITEMS // 15, 1),
    "1 to 8192 children": (ITEMS // 5, ITEMS, 4),
}

Inputs = tuple[Tensor, Tensor, Tensor, TrieLevel | None, Tensor, AllowedNodes | None, Tensor, Tensor]


def rows() -> Iterator[KernelRow]:
    """Scores, placement and the whole selection, at each kind of level, batch and type of logits."""
    for kind in ("unconstrained", *LEVELS):
        level = None if kind == "unconstrained" else _level(*LEVELS[kind])
        capacity = None if level is None else compact_capacity(level.first_child.diff().cpu().numpy(), K)
        for batch in BATCHES:
            for dtype in (torch.float32, torch.bfloat16):
                for filters in (False, True) if level is not None and dtype == torch.float32 else (False,):
                    yield from _rows(kind, level, batch, dtype, filters, capacity)


def _parents(size: int, parents: int, skew: int, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(size, device="cuda", dtype=torch.float64, generator=generator)
    return (uniform**skew * parents).long().clamp(max=parents - 1)


def _level(parents: int, more: int, skew: int) -> TrieLevel:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(below: int, size: int) -> Tensor:
        return torch.randint(0, below, (size,), device="cuda", generator=generator)

    own = torch.arange(parents, device="cuda") * CODES + random(CODES, parents)
    keys = torch.cat([own, _parents(more, parents, skew, generator) * CODES + random(CODES, more)]).unique()
    first = torch.searchsorted(keys, torch.arange(parents + 1, device="cuda") * CODES)
    return TrieLevel(first.int(), (keys % CODES).int())


def _beams(parents: int, skew: int, generator: torch.Generator) -> Tensor:
    """int32 [K], distinct nodes in order."""
    nodes = _parents(8 * K, parents, skew, generator).unique()
    return nodes[torch.randperm(len(nodes), device="cuda", generator=generator)[:K]].sort().values.int()


def _inputs(kind: str, level: TrieLevel | None, batch: int, dtype: torch.dtype, filters: bool, seed: int) -> Inputs:
    """(logits, parent scores, beam counts, level, nodes, filters, out, dense mask of legal candidates)."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = (torch.randn(batch * K, CODES, device="cuda", generator=generator) * 2).to(dtype)
    scores = torch.randn(batch, K, device="cuda", generator=generator) - 9
    counts = torch.full((batch,), K, dtype=torch.int32, device="cuda")
    nodes = torch.zeros(batch, K, dtype=torch.int32, device="cuda")
    if level is not None:
        parents, _, skew = LEVELS[kind]
        nodes = torch.stack([_beams(parents, skew, generator) for _ in range(batch)])
    allowed = None
    if filters and level is not None:
        words = torch.randint(-(2**31), 2**31, (batch, -(-len(level.codes) // 32)), device="cuda", generator=generator)
        allowed = AllowedNodes(words.int(), torch.ones_like(counts))
    legal = reference.score_candidates(torch.zeros_like(logits), None, counts, level, nodes, allowed).isfinite()
    out = torch.empty(batch, K * CODES, device="cuda")
    return logits, scores, counts, level, nodes, allowed, out, legal


def _rows(
    kind: str, level: TrieLevel | None, batch: int, dtype: torch.dtype, filters: bool, capacity: int | None
) -> Iterator[KernelRow]:
    copies = copies_beyond_l2(batch * K * CODES * (4 + dtype.itemsize), at_most=8)
    inputs = [_inputs(kind, level, batch, dtype, filters, seed) for seed in range(copies)]

    def scores(*one: object) -> Tensor:
        return score_candidates(*one[:7])  # type: ignore[arg-type]

    def selected(*one: object) -> object:
        return select_level(*one[:6], k=K, row_k=None, in_sid_order=True, scores_out=one[6])  # type: ignore[arg-type,misc]

    torch.compiler.reset()  # or after some shapes it would silently run eagerly
    dense: Callable[..., Tensor] = torch.compile(_dense_scores, dynamic=False)

    def torch_selected(*one: Tensor) -> object:
        values, indices = dense(*one).topk(K, dim=1)
        indices, order = indices.sort(dim=1)
        return values.gather(1, order), indices // CODES, indices % CODES

    found, expected = scores(*inputs[0]), reference.score_candidates(*inputs[0][:6])
    assert torch.equal(found == float("-inf"), expected == float("-inf"))
    error = float((found - expected).nan_to_num(0.0).abs().max())
    del expected
    shape = f"B{batch} W{K} {kind}{', filtered' if filters else ''} {str(dtype).removeprefix('torch.')}"
    traffic = batch * K * CODES * (4 + dtype.itemsize)
    us, dense_us = time_us(scores, inputs), time_us(dense, inputs)
    yield make_row("level_scores", shape, us, 0, traffic, ("torch.compile, dense mask", dense_us), error)
    us, torch_us = time_us(selected, inputs), time_us(torch_selected, inputs)
    read_again = batch * K * CODES * 4
    yield make_row("level_select", shape, us, 0, traffic + read_again, ("the same, torch.topk, sort", torch_us), error)
    if capacity is not None:
        yield from _compact(shape, inputs, capacity, dense_us, torch_us)
    if dtype == torch.float32 and not filters:
        yield _placement(shape, inputs)


def _compact(shape: str, inputs: list[Inputs], capacity: int, dense_us: float, torch_us: float) -> Iterator[KernelRow]:
    """The same in a compact table, which must give the same beams."""
    batch = len(inputs[0][2])
    compact = [(*one[:6], one[6].view(-1)[: batch * capacity].view(batch, capacity)) for one in inputs]

    def scores(*one: object) -> object:
        return score_level(*one[:6], capacity=capacity, scores_out=one[6])  # type: ignore[arg-type,misc]

    def selected(*one: object, compact: bool = True) -> AdvancedBeams:
        named = {"scores_out": one[6], "capacity": capacity} if compact else {}
        return select_level(*one[:6], k=K, row_k=None, in_sid_order=True, **named)  # type: ignore[arg-type,misc]

    found, expected = selected(*compact[0]), selected(*compact[0], compact=False)
    assert torch.equal(found.nodes, expected.nodes) and torch.equal(found.parents, expected.parents)
    error = float((found.scores - expected.scores).nan_to_num(0.0).abs().max())
    del expected
    table, logits = batch * capacity * 4, inputs[0][0].nbytes
    shape = f"{shape}, {capacity} columns"
    us = time_us(scores, compact)
    yield make_row("level_scores_compact", shape, us, 0, logits + table, ("torch.compile, dense mask", dense_us), error)
    us = time_us(selected, compact)
    traffic = logits + 2 * table
    yield make_row("level_select_compact", shape, us, 0, traffic, ("the same, torch.topk, sort", torch_us), error)


def _placement(shape: str, inputs: list[Inputs]) -> KernelRow:
    chosen = []
    for one in inputs:
        score_candidates(*one[:7])
        values, indices = one[6].topk(K, dim=1)
        chosen.append((values, indices.int(), CODES, one[3], one[4], True))
    us, torch_us = time_us(advance_beams, chosen), time_us(_torch_placement, chosen)
    traffic = chosen[0][0].numel() * 6 * 4
    return make_row("level_placement", shape, us, 0, traffic, ("torch, without the nodes", torch_us), 0.0)


def _torch_placement(values: Tensor, indices: Tensor, codes: int, *_: object) -> tuple[Tensor, ...]:
    indices, order = indices.sort(dim=1)
    return values.gather(1, order), indices // codes, indices % codes


def _dense_scores(
    logits: Tensor,
    scores: Tensor,
    counts: Tensor,
    level: object,
    nodes: Tensor,
    allowed: object,
    out: Tensor,
    legal: Tensor,
) -> Tensor:
    wide = logits.float()
    total = (wide - wide.logsumexp(1, keepdim=True)).view(*scores.shape, -1) + scores[:, :, None]
    return total.flatten(1).masked_fill(~legal, float("-inf"))
