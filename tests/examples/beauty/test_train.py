"""Batches hold what they promise, training learns the ring, and the evaluation agrees with the validation."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.beauty.batches import PrefixSource, history_batch
from examples.beauty.evaluate import evaluate, load_engine, rank_targets
from examples.beauty.metrics import ranking_metrics
from examples.beauty.objective import Options
from examples.beauty.prepare import catalog_rows
from examples.beauty.search import VARIANTS, search, summary_of
from examples.beauty.sequences import VALIDATION, BeautyError, save_sequences
from examples.beauty.train import main, train
from examples.groceries.batches import Batch
from examples.groceries.prepare import write_lines
from loka_serve.models.checkpoint import load_checkpoint
from tests.examples.beauty.data import ITEMS, USERS, synthetic_sequences

CPU = torch.device("cpu")
SMALL = Options(
    d_model=32,
    layers=2,
    heads=2,
    head_dim=16,
    kv_groups=1,
    kv_layers=1,
    experts=2,
    expert_width=16,
    max_context=7,
    rows=16,
    epochs=12,
    learning_rate=1e-2,
    dropout=0.0,
    context_dropout=0.0,
    average_decay=0.9,
    beam=ITEMS,
)


def batches(history_dropout: float, epoch: int = 0) -> list[Batch]:
    source = PrefixSource(
        synthetic_sequences(), context=4, rows=10, history_dropout=history_dropout, device=CPU, seed=1
    )
    return [batch for _, batch in source.epoch(epoch)]


def test_every_prefix_is_an_example_once() -> None:
    sequences = synthetic_sequences()
    drawn = batches(0.0)
    examples = sum(len(sequences.history(user, VALIDATION)) - 1 for user in range(USERS))
    assert len(drawn) == examples // 10 and all(batch.history.shape == (10, 4, 3) for batch in drawn)
    number_of = {tuple(codes): item for item, codes in enumerate(sequences.semantic_ids.tolist())}
    for batch in drawn:
        assert torch.equal(batch.cutoffs[:, 0], batch.lengths) and (batch.lengths >= 1).all()
        for row, length in enumerate(batch.lengths.tolist()):
            # On the ring every history is the walk up to its target: nothing later, nothing of another user.
            target = number_of[tuple(batch.targets[row, 0].tolist())]
            history = [number_of[tuple(codes)] for codes in batch.history[row, :length].tolist()]
            assert history == [(target - length + step) % ITEMS for step in range(length)]


def test_epochs_differ_and_repeat() -> None:
    first, again, second = batches(0.5), batches(0.5), batches(0.5, epoch=1)
    assert all(torch.equal(a.history, b.history) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a.targets, b.targets) for a, b in zip(first, second, strict=True))


def test_items_left_out_close_the_gap() -> None:
    codes = torch.arange(4)[None, :, None].expand(1, 4, 3)
    kept = torch.tensor([[False, True, False, True]])
    history, lengths = history_batch(codes, kept)
    assert lengths.tolist() == [2] and history[0, :2, 0].tolist() == [1, 3]
    shorter = batches(0.5)
    assert sum(int(batch.lengths.sum()) for batch in shorter) < sum(int(batch.lengths.sum()) for batch in batches(0.0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prepared data and, in run/, a model that was trained on it."""
    folder = tmp_path_factory.mktemp("beauty")
    save_sequences(synthetic_sequences(), folder)
    write_lines(folder / "catalog.jsonl", catalog_rows(synthetic_sequences()))
    train(SMALL, synthetic_sequences(), folder / "run", CPU, log=lambda line: None)
    return folder


def test_training_learns_the_ring(trained: Path) -> None:
    records = json.loads((trained / "run" / "record.json").read_text())
    assert [record["epoch"] for record in records] == list(range(1, SMALL.epochs + 1))
    assert records[-1]["loss"] < 0.2 * records[0]["loss"]
    # The next item is certain; one of 24 by chance.
    assert records[-1]["validation"]["plain"]["recall@5"] > 0.9
    training = json.loads((trained / "run" / "checkpoint" / "training.json").read_text())
    best = max(record["validation"]["history_excluded"]["recall@10"] for record in records)
    assert training["best"]["validation"]["history_excluded"]["recall@10"] == best
    assert training["sequences_version"] == synthetic_sequences().version
    weights = load_checkpoint(trained / "run" / "checkpoint")
    assert weights.config.is_sparse(0) and weights.config.experts == 2


def test_the_engine_ranks_as_the_validation_did(trained: Path) -> None:
    sequences, checkpoint = synthetic_sequences(), trained / "run" / "checkpoint"
    engine = load_engine(trained, checkpoint, None, "cpu", beam=ITEMS)
    best = json.loads((checkpoint / "training.json").read_text())["best"]["validation"]
    for mode in ("plain", "history_excluded"):
        ranks = rank_targets(
            engine,
            engine.catalog,
            sequences,
            np.arange(USERS),
            held_out=VALIDATION,
            exclude_history=mode == "history_excluded",
        )
        # Weights in bfloat16 may swap near-ties: two of 40 users.
        assert ranking_metrics(ranks)["recall@5"] == pytest.approx(best[mode]["recall@5"], abs=0.05)


def test_results_hold_what_readers_look_for(trained: Path) -> None:
    results = evaluate(trained, trained / "run" / "checkpoint", None, "cpu", ITEMS, 1)
    for mode in ("plain", "history_excluded"):
        ours = results["ours"][mode]
        low, high = ours["recall@10_interval"]
        assert low <= ours["recall@10"] <= high and set(ours) > {"recall@5", "ndcg@5", "ndcg@10"}
        assert results["baselines"]["co_occurrence"][mode]["recall@5"] == 1.0
    assert results["environment"]["users"] == USERS and results["environment"]["parameters"] > 0


def test_a_checkpoint_of_other_semantic_ids_is_refused(trained: Path, tmp_path: Path) -> None:
    sequences = synthetic_sequences()
    save_sequences(dataclasses.replace(sequences, semantic_ids=sequences.semantic_ids[::-1].copy()), tmp_path)
    with pytest.raises(BeautyError, match="trained on semantic IDs of version"):
        evaluate(tmp_path, trained / "run" / "checkpoint", None, "cpu", ITEMS, 1)


def test_a_run_is_not_written_over(trained: Path) -> None:
    with pytest.raises(BeautyError, match="holds a run already"):
        train(SMALL, synthetic_sequences(), trained / "run", CPU, log=lambda line: None)


def test_the_command_stops_where_it_is_told(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--data", str(trained), "--out", str(tmp_path / "run"), "--device", "cpu", "--max-steps", "2"]
    sizes = ["--d-model", "32", "--layers", "1", "--kv-layers", "1", "--rows", "16", "--beam", "10"]
    monkeypatch.setattr(sys, "argv", ["train", *words, *sizes])
    main()
    records = json.loads((tmp_path / "run" / "record.json").read_text())
    assert [record["steps"] for record in records] == [2] and "validation" in records[0]


def test_a_run_of_seconds_ends_with_a_measurement(tmp_path: Path) -> None:
    records = train(SMALL, synthetic_sequences(), tmp_path / "run", CPU, seconds=0.2, log=lambda line: None)
    assert "validation" in records[-1] and (tmp_path / "run" / "checkpoint" / "model.safetensors").exists()


def test_the_search_keeps_the_best_that_may_be_committed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"d-model": "32", "layers": "1", "kv-layers": "1", "rows": "16", "max-steps": "1"}
    for name in ("base", "experts"):
        monkeypatch.setitem(VARIANTS, name, sizes)
    monkeypatch.setitem(VARIANTS, "dropout", {"d-model": "nonsense"})
    summary = search(["base", "experts", "dropout"], trained, tmp_path / "found", "cpu", [])
    assert summary["chosen"] == "base" and summary["failed"] == ["dropout"]
    assert (tmp_path / "found" / "checkpoint" / "training.json").exists()
    assert json.loads((tmp_path / "found" / "search.json").read_text())["variants"]["experts"]["steps"] == 1
    with pytest.raises(BeautyError, match="dropout.log"):
        search(["dropout"], trained, tmp_path / "none", "cpu", [])


def test_the_summary_is_the_best_measurement() -> None:
    def record(epoch: int, recall: float | None) -> dict[str, object]:
        measured = {} if recall is None else {"validation": {"history_excluded": {"recall@10": recall}}}
        return {"epoch": epoch, "steps": 10 * epoch, **measured}

    summary = summary_of([record(1, 0.1), record(2, 0.3), record(3, None), record(4, 0.2)])
    assert summary["epochs"] == 4 and summary["steps"] == 40 and summary["best"]["epoch"] == 2
