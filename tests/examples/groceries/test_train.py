"""Training: batches hold what they promise, the loss falls, and an interrupted run ends as an uninterrupted one."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from examples.groceries.batches import (
    ANY_ORDER,
    NEXT_BASKET,
    PRODUCT_NUMBER_ORDER,
    Batch,
    BatchSource,
    basket_starts,
    draw_chunks,
    held_out_bounds,
    training_weights,
)
from examples.groceries.objective import Options, loss_of, model_config
from examples.groceries.purchases import GroceriesError
from examples.groceries.scoring import LegalCodes
from examples.groceries.selection import TARGETS, selection_score
from examples.groceries.train import Clock, main, train
from examples.groceries.trainer import Trainer
from loka_serve.models.checkpoint import load_checkpoint
from tests.examples.groceries.data import BASKET, HOUSEHOLDS, synthetic_sequences

CPU = torch.device("cpu")
SMALL = Options(
    d_model=32,
    layers=2,
    heads=2,
    head_dim=16,
    kv_groups=1,
    kv_layers=1,
    expert_width=16,
    max_context=32,
    epochs=3,
    rows=4,
    chunk=8,
    learning_rate=1e-2,
    beam=8,
    average_decay=0.9,
)


def source(mode_shares: tuple[float, float, float]) -> BatchSource:
    return BatchSource(
        synthetic_sequences(),
        held_out=1,
        chunk=8,
        context=12,
        rows=4,
        mode_shares=mode_shares,
        feature_dropout=0.0,
        household_power=0.0,
        basket_power=0.0,
        device=CPU,
        seed=3,
    )


def batches(mode: int) -> list[Batch]:
    shares = tuple(float(mode == other) for other in range(3))
    return [batch for _, batch in source((shares[0], shares[1], shares[2])).epoch(0)]


def test_an_epoch_has_every_training_row_once() -> None:
    for mode in (NEXT_BASKET, PRODUCT_NUMBER_ORDER, ANY_ORDER):
        drawn = batches(mode)
        assert sum(int((batch.weights > 0).sum()) for batch in drawn) == HOUSEHOLDS * 4 * BASKET
        assert all((batch.features[:, 0] == mode).all() for batch in drawn)


def test_a_target_is_the_item_after_the_history_it_sees() -> None:
    sequences = synthetic_sequences()
    for batch in batches(PRODUCT_NUMBER_ORDER):
        rows, columns = np.nonzero(batch.weights.numpy() > 0)
        for row, column in zip(rows, columns, strict=True):
            cutoff = int(batch.cutoffs[row, column])
            assert 0 <= cutoff < batch.lengths[row] <= 12
            # Sequences repeat every four items, so that the target equals the item four places earlier.
            if cutoff >= BASKET:
                assert torch.equal(batch.targets[row, column], batch.history[row, cutoff - BASKET])
            assert (sequences.semantic_ids == batch.targets[row, column].numpy()).all(axis=1).any()


def test_next_basket_targets_see_nothing_of_their_own_basket() -> None:
    for batch in batches(NEXT_BASKET):
        for row in range(len(batch.lengths)):
            cutoffs = batch.cutoffs[row][batch.weights[row] > 0]
            # Contexts start at a household's first item or at most 12 items back, baskets have 4 items.
            assert len(set(cutoffs.tolist())) <= 3
            assert (batch.lengths[row] - cutoffs.max() <= BASKET).all()


def test_chunks_are_disjoint_and_their_contexts_bounded() -> None:
    chunks = draw_chunks(np.array([0, 50]), np.array([37, 50]), 8, 20, np.random.default_rng(0))
    assert [target for chunk in chunks for target in range(chunk.start, chunk.end)] == list(range(37))
    assert all(chunk.end - chunk.context_start <= 20 and chunk.end - chunk.start <= 8 for chunk in chunks)
    assert all(chunk.context_start == max(0, chunk.end - 20) for chunk in chunks)


def test_held_out_bounds_and_basket_starts() -> None:
    sequences = synthetic_sequences()
    starts, ends = held_out_bounds(sequences, 1)
    assert starts.tolist()[:2] == [16, 40] and ends.tolist()[:2] == [20, 44]
    assert basket_starts(sequences)[:10].tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]


def test_training_weights_have_mean_one_and_the_asked_ratios() -> None:
    sequences = synthetic_sequences()
    ends = sequences.household_offsets[1:].copy()
    ends[0] = 6  # household 0 trains on 6 rows, the others on 24
    weights = training_weights(sequences, ends, household_power=0.5, basket_power=1.0)
    in_training = np.arange(len(sequences.items)) < ends[sequences.households]
    np.testing.assert_allclose(weights[:, in_training].mean(axis=1), 1.0, rtol=1e-5)
    assert weights[0, 0] / weights[0, 30] == pytest.approx(2.0)  # (24 / 6) ** 0.5


def test_loss_by_hand() -> None:
    # Two levels of two codes; items (0, 0), (0, 1) and (1, 0): after code 1, code 1 is illegal.
    legal = LegalCodes(np.array([[0, 0], [0, 1], [1, 0]], dtype=np.int32), (2, 2), CPU)
    logits = [torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[2.0, 3.0]]])]
    empty = torch.zeros(1, 0, dtype=torch.long)
    batch = Batch(empty, empty, empty, torch.tensor([[[1, 0]]]), empty, torch.ones(1, 1))
    first = float(np.log(1 + np.exp(-1.0)))  # both first codes are legal
    second = float(np.log(1 + np.exp(1.0)))  # the only legal second code: no choice, but its probability counts
    assert loss_of(logits, batch, legal, 0.0).item() == pytest.approx(first, abs=1e-6)
    assert loss_of(logits, batch, legal, 1.0).item() == pytest.approx(first + second, abs=1e-6)


def test_training_learns_the_shop(tmp_path: Path) -> None:
    options = dataclasses.replace(SMALL, epochs=8, dropout=0.0, context_dropout=0.0)
    records = train(options, synthetic_sequences(), tmp_path, CPU, log=lambda line: None)
    losses = [record["loss"] for record in records]
    # The items of a household's baskets are certain in product-number order and one of four otherwise: far below the
    # log(24) = 3.2 of knowing nothing.
    assert losses[-1] < 0.6 * losses[0]
    assert records[-1]["validation"]["basket"]["recall@10"] > 0.9
    training = json.loads((tmp_path / "checkpoint" / "training.json").read_text())
    assert training["sequences_version"] == synthetic_sequences().version
    assert training["best"]["score"] == max(record["score"] for record in records)
    assert next(load_checkpoint(tmp_path / "checkpoint").parameters()).dtype == torch.bfloat16


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    sequences = synthetic_sequences()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = train(SMALL, sequences, whole, CPU, log=lambda line: None)
    train(SMALL, sequences, parts, CPU, stop_after=1, log=lambda line: None)
    resumed = train(SMALL, sequences, parts, CPU, log=lambda line: None)
    assert [record["loss"] for record in resumed] == [record["loss"] for record in expected]
    trainers = []
    for directory in (whole, parts):
        trainers.append(Trainer(SMALL, model_config(SMALL, sequences), sequences.semantic_ids, CPU))
        assert trainers[-1].load_state(directory / "state.safetensors") == 3
    for kind in ("model", "average"):
        first, second = (getattr(trainer, kind).state_dict() for trainer in trainers)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_state_of_other_options_is_refused(tmp_path: Path) -> None:
    train(SMALL, synthetic_sequences(), tmp_path, CPU, max_steps=1, log=lambda line: None)
    with pytest.raises(GroceriesError, match="written with other options"):
        train(dataclasses.replace(SMALL, seed=9), synthetic_sequences(), tmp_path, CPU, log=lambda line: None)


def test_damaged_files_of_an_interrupted_run_are_refused_by_name(tmp_path: Path) -> None:
    train(SMALL, synthetic_sequences(), tmp_path, CPU, max_steps=1, log=lambda line: None)
    state, whole = tmp_path / "state.safetensors", (tmp_path / "state.safetensors").read_bytes()
    tensors, options = load_file(state), json.dumps(dataclasses.asdict(SMALL))
    metadata = {"epoch": "1", "steps": "1", "options": options}
    average = next(name for name in tensors if name.startswith("average."))
    rest = {name: tensor for name, tensor in tensors.items() if name != average}
    damaged: list[bytes] = [b"", whole[:-10], b"text"]
    for content, described in (
        (rest, metadata),
        ({**rest, average: torch.zeros(1, 7)}, metadata),
        ({**tensors, "optimizer.exp_avg": torch.zeros(1)}, metadata),
        (tensors, None),
        (tensors, {**metadata, "options": "{"}),
        (tensors, {**metadata, "steps": "some"}),
    ):
        damaged.append(save(content, described))
    for content_bytes in damaged:
        state.write_bytes(content_bytes)
        with pytest.raises(GroceriesError, match=r"state\.safetensors: not what an interrupted run leaves"):
            train(SMALL, synthetic_sequences(), tmp_path, CPU, max_steps=1, log=lambda line: None)
    state.write_bytes(whole)
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(GroceriesError, match=r"record\.json: expected a list of objects in JSON"):
        train(SMALL, synthetic_sequences(), tmp_path, CPU, max_steps=1, log=lambda line: None)


def test_the_open_basket_is_on_or_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["train", "--data", str(tmp_path), "--out", str(tmp_path), "--open-basket-items", "2"]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: argument --open-basket-items: expected 0 or 1, got '2'")


def test_the_clock_leaves_time_for_the_last_measurement() -> None:
    seconds = [100.0]
    clock = Clock(100.0, now=lambda: seconds[0])
    assert clock.progress() == 0.0 and not clock.measurement_due()
    seconds[0] = 150.0
    assert clock.measurement_due() and not clock.measurement_due()
    clock.measured_for(8.0)
    seconds[0] = 190.0
    assert clock.progress() == 1.0 and clock.measurement_due() and clock.measurement_due()


def test_a_run_of_fixed_duration_ends_measured_and_in_time(tmp_path: Path) -> None:
    sequences = synthetic_sequences()
    options = dataclasses.replace(SMALL, open_basket_items=1)
    started = time.monotonic()
    records = train(options, sequences, tmp_path, CPU, seconds=3.0, log=lambda line: None)
    assert time.monotonic() - started < 6.0
    assert "validation" not in records[0] and "validation" in records[-1]
    training = json.loads((tmp_path / "checkpoint" / "training.json").read_text())
    assert training["best"]["score"] == max(record.get("score", 0.0) for record in records)
    assert training["clock"]["seconds"] == 3.0
    with pytest.raises(GroceriesError, match="use another --out"):
        train(options, sequences, tmp_path, CPU, seconds=3.0, log=lambda line: None)


def test_the_worst_measure_decides() -> None:
    reached: dict[str, dict[str, float]] = {measure: {} for measure, _ in TARGETS}
    for (measure, name), target in TARGETS.items():
        reached[measure][name] = 1.1 * target
    assert selection_score(reached) == pytest.approx(1.1)
    reached["basket"]["ndcg@10"] = 0.9 * TARGETS["basket", "ndcg@10"]
    assert selection_score(reached) == pytest.approx(0.9)


def test_balancing_raises_the_bias_of_idle_experts() -> None:
    trainer = Trainer(SMALL, model_config(SMALL, synthetic_sequences()), synthetic_sequences().semantic_ids, CPU)
    block, load = trainer.load[0]
    load.copy_(torch.tensor([8.0, 0, 0, 0, 0, 0, 0, 0]))
    trainer._balance()
    assert block.selection_bias[0] < 0 < block.selection_bias[1]
    assert not load.any()
