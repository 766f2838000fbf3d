"""Constrained beam search against brute force: scores, order, ties, filters and the edge cases that break others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_serve.catalog.filters import CatalogFilter, build_filter
from loka_serve.catalog.trie import Trie, compile_trie
from loka_serve.decoding.beam_search import Beams, beam_search
from loka_serve.decoding.trie_tensors import TrieTensors, stack_filters
from loka_serve.models.onerec_v2 import Context
from tests.decoding.brute_force import PrefixModel, brute_force_beams

# Float32 sums of at most 5 log-probabilities of size <= 20 against float64.
SCORE_TOLERANCE = 2e-5


def search(
    model: PrefixModel, trie: Trie, users: list[int], widths: list[int], filters: list[CatalogFilter | None]
) -> Beams:
    tensors = TrieTensors.from_trie(trie, "cpu")
    context = Context([], [], torch.tensor(users))
    allowed = stack_filters(filters, trie.node_counts, "cpu")
    return beam_search(model, tensors, context, torch.tensor(widths), allowed)  # type: ignore[arg-type]


def leaves_allowed(trie: Trie, request_filter: CatalogFilter | None) -> list[tuple[int, ...]]:
    offsets = trie.item_offsets
    return [
        tuple(semantic_id)
        for leaf, semantic_id in enumerate(trie.semantic_ids().tolist())
        if request_filter is None or request_filter.allowed_items[offsets[leaf] : offsets[leaf + 1]].any()
    ]


def assert_equals_brute_force(
    beams: Beams, row: int, trie: Trie, model: PrefixModel, user: int, width: int, request_filter: CatalogFilter | None
) -> None:
    legal = leaves_allowed(trie, request_filter)
    expected = brute_force_beams(legal, model.log_probabilities(user), width)
    leaves = [leaf for leaf in beams.nodes[row].tolist() if leaf >= 0]
    assert [tuple(trie.semantic_ids()[leaf].tolist()) for leaf in leaves] == [
        semantic_id for semantic_id, _ in expected
    ]
    np.testing.assert_allclose(
        beams.scores[row, : len(leaves)].numpy(), [score for _, score in expected], atol=SCORE_TOLERANCE
    )
    assert (beams.scores[row, len(leaves) :] == float("-inf")).all()


def exclude(trie: Trie, items: list[int]) -> CatalogFilter | None:
    leaf_of_item = np.repeat(np.arange(trie.leaf_count, dtype=np.int32), np.diff(trie.item_offsets))
    return build_filter(trie, leaf_of_item, {}, items, {})


@st.composite
def catalogs(draw: st.DrawFn) -> Trie:
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=5)))
    rows = draw(st.lists(st.tuples(*[st.integers(0, size - 1) for size in sizes]), min_size=1, max_size=40))
    trie, _ = compile_trie(np.array(rows), None, sizes)
    return trie


@given(catalogs(), st.data())
@settings(max_examples=150, deadline=None)
def test_equals_brute_force_for_ragged_beams_and_filters(trie: Trie, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 4))
    users = [data.draw(st.integers(0, 60)) for _ in range(batch)]
    widths = [data.draw(st.integers(1, 50)) for _ in range(batch)]
    filters = [exclude(trie, data.draw(st.lists(st.integers(0, trie.item_count - 1)))) for _ in range(batch)]
    model = PrefixModel(trie.codebook_sizes)
    beams = search(model, trie, users, widths, filters)
    assert not beams.failed.any()
    for row in range(batch):
        assert_equals_brute_force(beams, row, trie, model, users[row], widths[row], filters[row])


def test_all_scores_equal_gives_catalog_order() -> None:
    trie, _ = compile_trie(np.array([[1, 1], [0, 2], [2, 0], [0, 0], [1, 0]]), None, (3, 3))
    beams = search(PrefixModel((3, 3), spread=0.0), trie, [0], [4], [None])
    assert beams.nodes[0].tolist() == [0, 1, 2, 3]


def test_tie_across_parents_goes_to_the_lower_item_although_its_parent_scores_lower() -> None:
    class TwoPaths(PrefixModel):
        def level_logits(self, hidden: torch.Tensor, level: int) -> torch.Tensor:
            # Level 0 prefers code 1 by log 2; level 1 takes it back exactly: -log(3), -log(3/2) then -log(2), 0.
            if level == 0:
                return torch.tensor([0.5, 1.0]).log().expand(*hidden.shape[:-1], 2)
            after = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
            return after[hidden[..., -1]]

    trie, _ = compile_trie(np.array([[0, 0], [1, 0], [1, 1]]), None, (2, 2))
    beams = search(TwoPaths((2, 2)), trie, [0], [3], [None])
    assert beams.nodes[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(beams.scores[0], torch.tensor([1 / 3] * 3).log())


def test_everything_excluded_but_one_item_is_found_with_one_beam() -> None:
    semantic_ids = np.array([[first, second, third] for first in range(4) for second in range(4) for third in range(4)])
    trie, _ = compile_trie(semantic_ids, None, (4, 4, 4))
    for survivor in (0, 21, 63):
        request_filter = exclude(trie, [item for item in range(64) if item != survivor])
        beams = search(PrefixModel((4, 4, 4)), trie, [3], [1], [request_filter])
        assert beams.nodes.tolist() == [[survivor]]


def test_empty_allowed_set_yields_nothing_and_leaves_neighbours_alone() -> None:
    trie, _ = compile_trie(np.array([[0, 0, 1], [1, 2, 0], [2, 2, 2]]), None, (3, 3, 3))
    model = PrefixModel((3, 3, 3))
    nothing = exclude(trie, [0, 1, 2])
    beams = search(model, trie, [5, 5], [2, 2], [nothing, None])
    assert beams.nodes[0].tolist() == [-1, -1]
    assert_equals_brute_force(beams, 1, trie, model, 5, 2, None)
    alone = search(model, trie, [5], [2], [nothing])
    assert (alone.nodes == -1).all() and not alone.failed.any()


def test_a_score_that_is_not_a_number_fails_its_request_alone() -> None:
    class Poisoned(PrefixModel):
        def level_logits(self, hidden: torch.Tensor, level: int) -> torch.Tensor:
            logits = super().level_logits(hidden, level)
            if level == 1:
                logits[1] = float("nan")
            return logits

    trie, _ = compile_trie(np.random.default_rng(0).integers(0, 5, (30, 3)), None, (5, 5, 5))
    model = Poisoned((5, 5, 5))
    beams = search(model, trie, [1, 2, 3], [4, 4, 4], [None, None, None])
    assert beams.failed.tolist() == [False, True, False]
    for row, user in ((0, 1), (2, 3)):
        assert_equals_brute_force(beams, row, trie, PrefixModel((5, 5, 5)), user, 4, None)


@pytest.mark.parametrize("levels", [2, 3, 4, 5])
def test_no_beam_dies(levels: int) -> None:
    """With beams for n items, n items come back whenever n exist, however the mask is drawn."""
    generator = np.random.default_rng(levels)
    trie, _ = compile_trie(generator.integers(0, 6, (200, levels)), None, (6,) * levels)
    for trial in range(20):
        excluded = generator.permutation(trie.item_count)[: int(trie.item_count * generator.uniform(0.5, 1.0))]
        request_filter = exclude(trie, excluded.tolist())
        width = int(generator.integers(1, 30))
        beams = search(PrefixModel((6,) * levels), trie, [trial], [width], [request_filter])
        assert int((beams.nodes >= 0).sum()) == min(width, len(leaves_allowed(trie, request_filter)))
