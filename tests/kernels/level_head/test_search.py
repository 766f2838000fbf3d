"""Level after level through `select_level` against `beam_search.select`: same beams, same order, same ties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka_serve.catalog.trie import Trie, compile_trie
from loka_serve.decoding.beam_search import Beams, select
from loka_serve.decoding.trie_tensors import TrieTensors
from loka_serve.kernels.level_head import reference
from loka_serve.kernels.level_head.reference import AdvancedBeams, AllowedNodes, TrieLevel, pack_allowed
from tests.kernels.devices import DEVICE, needs_triton

Select = Callable[..., AdvancedBeams]
LEVELS, K = 3, 6


def of_reference(*arguments: object, **named: object) -> AdvancedBeams:
    logits, scores, counts, children, nodes, allowed, k, row_k, in_sid_order, failed = arguments
    capacity, prefix = named.get("capacity"), None
    level = logits, scores, counts, children, nodes, allowed
    if capacity is None:
        candidates = reference.score_candidates(*level)  # type: ignore[arg-type]
    else:
        candidates = reference.score_compact(*level, capacity)  # type: ignore[arg-type]
        prefix = reference.child_prefix(counts, children, nodes)  # type: ignore[arg-type]
    values, indices = reference.topk(candidates, k, row_k)  # type: ignore[arg-type]
    codes = logits.shape[1]  # type: ignore[attr-defined]
    return reference.advance_beams(values, indices, codes, children, nodes, in_sid_order, failed, prefix)  # type: ignore[arg-type]


def of_kernels(*arguments: object, **named: object) -> AdvancedBeams:
    from loka_serve.kernels.level_head.select import select_level

    return select_level(*arguments, **named)  # type: ignore[arg-type]


def capacities_of(trie: Trie) -> list[int]:
    """Of each level's compact table, for one beam, then K: as tight as can be."""
    counts = [np.array(trie.node_counts[:1]), *(np.diff(offsets) for offsets in trie.child_offsets)]
    return [reference.compact_capacity(each, 1 if level == 0 else K) for level, each in enumerate(counts)]


def trie_levels(trie: Trie) -> list[TrieLevel]:
    roots = torch.tensor([0, len(trie.tokens[0])], dtype=torch.int32, device=DEVICE)
    first = [roots, *(with_room(offsets) for offsets in trie.child_offsets)]
    return [TrieLevel(first[level], with_room(trie.tokens[level])) for level in range(trie.levels)]


def with_room(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.append(values, [0, 0, 0]).astype(np.int32)).to(DEVICE)


def filters_of(trie: Trie, batch: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Per level bool [batch, nodes]; request 0 may go anywhere, the last one nowhere."""
    allowed = generator.random((batch, trie.leaf_count)) < generator.random((batch, 1))
    allowed[0], allowed[-1] = True, False
    masks = [allowed]
    for parents, nodes in zip(reversed(trie.parents), reversed(trie.node_counts[:-1]), strict=True):
        above = np.zeros((batch, nodes), dtype=np.bool_)
        for row, children in zip(above, masks[0], strict=True):
            row[parents[children]] = True
        masks.insert(0, above)
    return masks


def assert_same_search(select_level: Select, seed: int, ties: bool, filters: bool, poison: bool, compact: bool) -> None:
    generator = np.random.default_rng(seed)
    sizes = tuple(int(size) for size in generator.integers(1, 12, LEVELS))
    semantic_ids = generator.integers(0, sizes, (int(generator.integers(1, 60)), LEVELS))
    trie, _ = compile_trie(semantic_ids, codebook_sizes=sizes)
    tensors, levels = TrieTensors.from_trie(trie, DEVICE), trie_levels(trie)
    capacities: list[int | None] = [*capacities_of(trie)] if compact else [None] * LEVELS
    batch = int(generator.integers(2, 5))
    row_k = torch.from_numpy(generator.integers(1, K + 1, batch)).int().to(DEVICE)
    masks = filters_of(trie, batch, generator) if filters else None

    expected: Beams | None = None
    found: AdvancedBeams | None = None
    for level, codes in enumerate(sizes):
        width = 1 if level == 0 else K
        logits = torch.from_numpy(generator.normal(size=(batch, width, codes)).astype(np.float32)).to(DEVICE)
        if ties:
            logits = torch.zeros_like(logits)
        if poison and level == 1:
            logits[1, 0, 0] = float("nan")
        last = level == LEVELS - 1
        beams = 1 if expected is None else expected.nodes.shape[1]
        allowed = None if masks is None else torch.from_numpy(masks[level]).to(DEVICE)
        expected = select(logits[:, :beams], expected, tensors, level, row_k.long(), allowed, in_score_order=last)

        packed = None
        if masks is not None:
            rows = [pack_allowed(np.append(row, [False] * 3)) for row in masks[level]]
            words = torch.from_numpy(np.stack(rows)).to(DEVICE)
            packed = AllowedNodes(words, (torch.arange(batch) > 0).int().to(DEVICE))
        before: tuple[Tensor | None, Tensor, Tensor, Tensor | None]
        if found is None:
            before = None, row_k.new_ones(batch), row_k.new_zeros(batch, 1), None
        else:
            before = found.scores, found.counts, found.nodes, found.failed
        scores, counts, nodes, failed = before
        flat = logits.flatten(0, 1)
        arguments = flat, scores, counts, levels[level], nodes, packed, K, row_k, not last, failed
        found = select_level(*arguments, capacity=capacities[level])
        assert_same_beams(found, expected)


def assert_same_beams(found: AdvancedBeams, expected: Beams) -> None:
    assert found.failed.bool().tolist() == expected.failed.tolist()
    for request, count in enumerate(found.counts.tolist()):
        live = expected.nodes[request] >= 0
        assert count == int(live.sum()) and live[:count].all()
        assert found.nodes[request, :count].tolist() == expected.nodes[request, :count].tolist()
        assert found.parents[request, :count].tolist() == expected.parents[request, :count].tolist()
        torch.testing.assert_close(
            found.scores[request, :count], expected.scores[request, :count], rtol=1e-6, atol=2e-6, equal_nan=True
        )
        assert (found.nodes[request, count:] == -1).all()
        assert (found.scores[request, count:] == float("-inf")).all()


@pytest.mark.parametrize("compact", [False, True])
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_reference_search(compact: bool, seed: int, ties: bool, filters: bool, poison: bool) -> None:
    assert_same_search(of_reference, seed, ties, filters, poison, compact)


@needs_triton
@pytest.mark.parametrize("compact", [False, True])
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_kernels_search(compact: bool, seed: int, ties: bool, filters: bool, poison: bool) -> None:
    assert_same_search(of_kernels, seed, ties, filters, poison, compact)


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 50))
def test_capacity_is_that_of_the_widest_nodes(counts: list[int], beams: int) -> None:
    capacity = reference.compact_capacity(np.array(counts, dtype=np.int64), beams)
    widest = sum(sorted(counts, reverse=True)[:beams])
    assert widest <= capacity < widest + 17 and capacity % 16 == 0 and capacity > 0


@needs_triton
@pytest.mark.parametrize("select_level", [of_reference, of_kernels])
def test_unconstrained_search_covers_the_whole_codebook(select_level: Select) -> None:
    codes, width, batch = 11, 7, 2
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(batch * beams, codes, generator=generator).to(DEVICE) for beams in (1, width)]
    ones = torch.ones(batch, dtype=torch.int32, device=DEVICE)
    first = select_level(logits[0], None, ones, None, None, None, width, None, True, None)
    assert torch.equal(first.nodes, logits[0].topk(width).indices.sort(dim=1).values.int())
    second = select_level(logits[1], first.scores, first.counts, None, None, None, width, None, False, first.failed)
    table = logits[1].log_softmax(1).view(batch, width, codes) + first.scores[:, :, None]
    best = table.flatten(1).topk(width)
    torch.testing.assert_close(second.scores, best.values)
    assert torch.equal(second.parents * codes + second.codes, best.indices.int())
    assert torch.equal(second.nodes, second.codes) and second.counts.tolist() == [width, width]
