"""A context shared by baskets filled differently gives each target what a request of its own would get."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from examples.groceries.batches import ANY_ORDER, NEXT_BASKET, BatchSource, feature_configs
from examples.groceries.contexts import BASKET_ITEMS, SLOTS, SharedContext, basket_items_index, shared_context
from examples.groceries.objective import Options, fresh_model, model_config
from examples.groceries.scoring import LegalCodes, beam_search, held_out_batches, recommend
from examples.groceries.trainer import Trainer
from loka_serve.models.checkpoint import save_checkpoint
from loka_serve.models.onerec_v2 import OneRecV2
from tests.examples.groceries.data import BASKET, synthetic_sequences

CPU = torch.device("cpu")
COUNTED = Options(
    d_model=32, layers=2, heads=2, head_dim=16, kv_groups=1, kv_layers=1, expert_width=16, max_context=16, rows=4,
    chunk=8, open_basket_items=1, count_dropout=0.0,
)  # fmt: skip


def counted_model() -> OneRecV2:
    return fresh_model(model_config(COUNTED, synthetic_sequences()), COUNTED, CPU).eval()


def test_values_name_what_their_index_stands_for() -> None:
    assert len(BASKET_ITEMS.values) + 1 == SLOTS == 40
    for count, value in ((0, "0"), (7, "7"), (31, "31"), (32, "32-35"), (35, "32-35"), (36, "36-41"), (500, "100+")):
        assert basket_items_index(torch.tensor([count])).item() == BASKET_ITEMS.index_of(value)


def test_every_target_gets_what_a_request_of_its_own_gets() -> None:
    sequences, model = synthetic_sequences(), counted_model()
    legal = LegalCodes(sequences.semantic_ids, sequences.codebook_sizes, CPU)
    codes = torch.from_numpy(sequences.semantic_ids).long()
    history = codes[torch.from_numpy(sequences.items[:24]).long()].reshape(2, 12, 3)
    lengths, features = torch.tensor([12, 9]), torch.zeros(2, len(model.config.features), dtype=torch.long)
    features[:, 0], features[1, 1] = ANY_ORDER, 1
    cutoffs, counts = torch.tensor([[0, 5, 12], [9, 1, 3]]), torch.tensor([[1, 3, 40], [2, 2, 0]]).clamp_max(SLOTS - 1)
    targets = history[:, :3]
    with torch.no_grad():
        shared = shared_context(model, history, lengths, features, counts)
        assert isinstance(shared, SharedContext)
        logits = model.teacher_forced(shared, targets, cutoffs)
        found, scores = beam_search(model, shared, cutoffs, legal, beam=5)
        for row, column in np.ndindex(2, 3):
            cutoff = int(cutoffs[row, column])
            own = features[row : row + 1].clone()
            own[0, -1] = counts[row, column]
            alone = model.prepare_context(history[row : row + 1, :cutoff], torch.tensor([cutoff]), own)
            at = torch.tensor([[cutoff]])
            expected = model.teacher_forced(alone, targets[row : row + 1, column : column + 1], at)
            for level in range(3):
                torch.testing.assert_close(logits[level][row, column], expected[level][0, 0], atol=1e-5, rtol=1e-5)
            own_codes, own_scores = beam_search(model, alone, at, legal, beam=5)
            assert torch.equal(found[row, column], own_codes[0, 0])
            torch.testing.assert_close(scores[row, column], own_scores[0, 0], atol=1e-5, rtol=1e-5)


def test_without_the_feature_the_context_is_the_plain_one() -> None:
    sequences = synthetic_sequences()
    plain = fresh_model(
        model_config(dataclasses.replace(COUNTED, open_basket_items=0), sequences),
        dataclasses.replace(COUNTED, open_basket_items=0),
        CPU,
    )
    arguments = (torch.zeros(1, 4, 3).long(), torch.tensor([4]), torch.zeros(1, 5).long())
    assert not isinstance(shared_context(plain, *arguments, torch.ones(1, 2).long()), SharedContext)
    arguments = (*arguments[:2], torch.zeros(1, 6).long())
    assert not isinstance(shared_context(counted_model(), *arguments, None), SharedContext)


def test_batches_count_the_open_basket() -> None:
    sequences = synthetic_sequences()

    def source(mode: int, count_dropout: float) -> BatchSource:
        shares = tuple(float(mode == other) for other in range(3))
        return BatchSource(
            sequences, held_out=1, chunk=8, context=12, rows=4, mode_shares=(shares[0], shares[1], shares[2]),
            feature_dropout=0.5, household_power=0.0, basket_power=0.0, device=CPU, seed=3, count_dropout=count_dropout,
        )  # fmt: skip

    for _, batch in source(ANY_ORDER, 0.0).epoch(0):
        assert batch.basket_items is not None and batch.features.shape[1] == len(feature_configs(sequences, True))
        real = batch.weights > 0
        # Histories start at a household's first basket or at most 12 items, three baskets, back.
        counts = batch.basket_items[real] - 1
        assert counts.min() >= 0 and counts.max() == BASKET - 1
        assert not batch.features[:, -1].any()
    for mode, dropout in ((NEXT_BASKET, 0.0), (ANY_ORDER, 1.0)):
        for _, batch in source(mode, dropout).epoch(0):
            assert batch.basket_items is not None and not batch.basket_items.any()


def test_held_out_baskets_count_from_nothing() -> None:
    sequences, model = synthetic_sequences(), counted_model()
    for mode, expected in ((ANY_ORDER, [1, 2, 3, 4]), (NEXT_BASKET, [0])):
        for batch in held_out_batches(
            sequences, model, held_out=0, mode=mode, targets_per_batch=8, device=CPU
        ):  # fmt: skip
            assert batch.basket_items.tolist() == [expected] * len(batch.households)
    legal = LegalCodes(sequences.semantic_ids, sequences.codebook_sizes, CPU)
    told, untold = (
        recommend(model, sequences, legal, held_out=0, mode=ANY_ORDER, beam=8, device=CPU, counted=counted)
        for counted in (True, False)
    )
    assert np.array_equal(told.targets, untold.targets) and not np.array_equal(told.items, untold.items)


def test_a_checkpoint_without_the_feature_is_where_a_run_can_start(tmp_path: Path) -> None:
    sequences = synthetic_sequences()
    earlier = fresh_model(
        model_config(dataclasses.replace(COUNTED, open_basket_items=0, seed=5), sequences),
        dataclasses.replace(COUNTED, open_basket_items=0, seed=5),
        CPU,
    )
    save_checkpoint(earlier, tmp_path)
    trainer = Trainer(COUNTED, model_config(COUNTED, sequences), sequences.semantic_ids, CPU)
    trainer.start_from(tmp_path)
    ours = trainer.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in earlier.state_dict().items())
    (added,) = set(ours) - set(earlier.state_dict())
    assert not ours[added].any()
    # Nothing is known of the new feature yet, so that it changes nothing; after a step it does.
    source = BatchSource(
        sequences, held_out=1, chunk=8, context=12, rows=4, mode_shares=(0.0, 0.0, 1.0), feature_dropout=0.0,
        household_power=0.0, basket_power=0.0, device=CPU, seed=3, count_dropout=0.0,
    )  # fmt: skip
    trainer.step(next(iter(source.epoch(0)))[1], 0.5)
    assert trainer.model.state_dict()[added][1 : BASKET + 1].abs().sum(-1).all()
    assert not trainer.model.state_dict()[added][BASKET + 1 :].any()
