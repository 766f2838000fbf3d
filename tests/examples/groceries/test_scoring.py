"""The fast scorer gives what the reference decoder does; beams of the committed checkpoint equal teacher forcing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from examples.groceries.batches import ANY_ORDER, NEXT_BASKET, PRODUCT_NUMBER_ORDER
from examples.groceries.evaluate import CHECKPOINT
from examples.groceries.objective import Options, fresh_model, model_config
from examples.groceries.prepare import SEMANTIC_IDS, Sequences, load_semantic_ids
from examples.groceries.scoring import MISSED, LegalCodes, Recommendations, beam_search, held_out_batches, recommend
from loka_serve.catalog.trie import compile_trie
from loka_serve.decoding.beam_search import beam_search as reference_beam_search
from loka_serve.decoding.trie_tensors import TrieTensors
from loka_serve.models.checkpoint import load_checkpoint
from loka_serve.models.onerec_v2 import OneRecV2
from tests.examples.groceries.data import BASKET, HOUSEHOLDS, synthetic_sequences

CPU = torch.device("cpu")


def small_model(sequences: Sequences) -> OneRecV2:
    options = Options(
        d_model=32, layers=2, heads=2, head_dim=16, kv_groups=1, kv_layers=1, expert_width=16, max_context=16
    )
    return fresh_model(model_config(options, sequences), options, CPU).eval()


def test_legal_codes() -> None:
    sequences = synthetic_sequences()
    legal = LegalCodes(sequences.semantic_ids, sequences.codebook_sizes, CPU)
    assert legal.mask(torch.zeros(1, 0, dtype=torch.long)).tolist() == [[True, True, True, False]]
    assert legal.mask(torch.tensor([[3, 0]])).tolist() == [[False, False]]
    codes = torch.from_numpy(sequences.semantic_ids).long()
    assert legal.item_of(codes).tolist() == list(range(24))
    assert legal.item_of(torch.tensor([3, 0, 0])).item() == -1


@pytest.mark.parametrize("beam", [5, 100])
def test_every_cutoff_gets_what_the_reference_decoder_gives(beam: int) -> None:
    sequences = synthetic_sequences()
    model = small_model(sequences)
    legal = LegalCodes(sequences.semantic_ids, sequences.codebook_sizes, CPU)
    trie, _ = compile_trie(sequences.semantic_ids, None, sequences.codebook_sizes)
    history = torch.from_numpy(sequences.semantic_ids[sequences.items[:12]]).long()[None]
    features = torch.zeros(1, len(model.config.features), dtype=torch.long)
    context = model.prepare_context(history, torch.tensor([12]), features)
    cutoffs = [0, 3, 12]
    with torch.no_grad():
        codes, scores = beam_search(model, context, torch.tensor([cutoffs]), legal, beam)
        for place, cutoff in enumerate(cutoffs):
            alone = model.prepare_context(history[:, :cutoff], torch.tensor([cutoff]), features)
            expected = reference_beam_search(model, TrieTensors.from_trie(trie, CPU), alone, torch.tensor([beam]))
            count = min(beam, 24)
            # The synthetic items are numbered in SID order, as leaves are.
            assert legal.item_of(codes)[0, place, :count].tolist() == expected.nodes[0].tolist()
            # Sums in another order: float32 rounding.
            torch.testing.assert_close(scores[0, place, :count], expected.scores[0], rtol=1e-5, atol=1e-5)
            assert (scores[0, place, count:] == -torch.inf).all()


def test_held_out_batches_of_the_three_modes() -> None:
    sequences = synthetic_sequences()
    model = small_model(sequences)
    for mode, positions in ((PRODUCT_NUMBER_ORDER, BASKET), (ANY_ORDER, BASKET), (NEXT_BASKET, 1)):
        batches = list(held_out_batches(sequences, model, held_out=0, mode=mode, targets_per_batch=12, device=CPU))
        assert sum(len(batch.households) for batch in batches) == HOUSEHOLDS
        items = sequences.items if mode == PRODUCT_NUMBER_ORDER else sequences.random_items
        for batch in batches:
            assert (batch.features[:, 0] == mode).all()
            for row, household in enumerate(batch.households):
                end = sequences.household_offsets[household + 1]
                assert batch.items[row].tolist() == items[end - BASKET : end][:positions].tolist()
                for column in range(positions):
                    # The newest visible item is the one before the target; contexts hold at most 16 items.
                    newest = items[end - BASKET + column - 1]
                    seen = batch.history[row, batch.cutoffs[row, column] - 1]
                    assert seen.tolist() == sequences.semantic_ids[newest].tolist()
                assert batch.lengths[row] <= 16


def test_ranks() -> None:
    items = np.array([[4, 2, 9], [1, 0, -1]])
    recommended = Recommendations(items, np.array([9, 7]), np.array([0, 1]))
    assert recommended.ranks().tolist() == [2, MISSED]


def test_recommendations_do_not_depend_on_the_batching() -> None:
    sequences = synthetic_sequences()
    model = small_model(sequences)
    legal = LegalCodes(sequences.semantic_ids, sequences.codebook_sizes, CPU)

    def run(targets_per_batch: int) -> Recommendations:
        return recommend(
            model, sequences, legal, held_out=0, mode=ANY_ORDER, beam=8, device=CPU, targets_per_batch=targets_per_batch
        )

    one, many = run(1), run(1000)
    order = [np.lexsort((result.targets, result.households)) for result in (one, many)]
    assert len(one.targets) == HOUSEHOLDS * BASKET
    assert np.array_equal(one.targets[order[0]], many.targets[order[1]])
    # Other batch shapes may round otherwise, which can swap neighbours: the sets must agree.
    assert np.array_equal(np.sort(one.items[order[0]], axis=1), np.sort(many.items[order[1]], axis=1))


def test_beams_of_the_committed_checkpoint_equal_teacher_forcing() -> None:
    model = load_checkpoint(CHECKPOINT, dtype=torch.float32)
    stored = np.load(SEMANTIC_IDS)
    semantic_ids, sizes = load_semantic_ids(SEMANTIC_IDS, len(stored) - 1)
    assert sizes == model.config.codebook_sizes
    trie, _ = compile_trie(semantic_ids, None, sizes)
    tensors = TrieTensors.from_trie(trie, CPU)
    generator = np.random.default_rng(0)
    history = torch.from_numpy(semantic_ids[generator.integers(0, len(semantic_ids), (3, 40))]).long()
    lengths = torch.tensor([40, 7, 0])
    with torch.no_grad():
        context = model.prepare_context(history, lengths, torch.zeros(3, len(model.config.features), dtype=torch.long))
        beams = reference_beam_search(model, tensors, context, torch.full((3,), 32))
        codes = torch.from_numpy(trie.semantic_ids().astype(np.int64))[beams.nodes]
        logits = model.teacher_forced(context, codes, lengths[:, None].expand(-1, 32))
        levels = [level.log_softmax(-1).gather(-1, codes[..., at, None])[..., 0] for at, level in enumerate(logits)]
    # Both are float32; self-attention runs over a cache in one and over all levels at once in the other.
    torch.testing.assert_close(torch.stack(levels).sum(0), beams.scores, rtol=1e-5, atol=1e-4)


def test_the_committed_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 10 << 20
    assert json.loads((CHECKPOINT / "config.json").read_text())["experts"] >= 8
