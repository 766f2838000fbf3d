"""The whole evaluation on the synthetic shop, an FP8 bundle included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from examples.groceries.batches import NEXT_BASKET
from examples.groceries.evaluate import CHECKPOINT, Source, compare, evaluate, recommend_all
from examples.groceries.objective import Options
from examples.groceries.prepare import catalog_rows, history_rows, save_sequences, write_lines
from examples.groceries.purchases import GroceriesError, Product
from examples.groceries.scoring import Recommendations
from examples.groceries.train import train
from loka_serve.build import build
from loka_serve.build_config import BuildConfig
from loka_serve.bundle import Bundle
from tests.examples.groceries.data import HOUSEHOLDS, ITEMS, synthetic_sequences


def test_comparison_by_hand() -> None:
    households = np.array([0, 1])
    first = Recommendations(np.array([[1, 2, 3], [4, 5, 6]]), np.array([2, 9]), households)
    second = Recommendations(np.array([[2, 1, 7], [4, 9, 6]]), np.array([2, 9]), households)
    result = compare(second, first)
    assert result["hr@10_relative_change"] == pytest.approx(1.0)  # one hit becomes two
    assert result["top50_overlap"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    before, after = 1 / np.log2(3), 1 + 1 / np.log2(3)
    assert result["ndcg@10_relative_change"] == pytest.approx(after / before - 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, run/checkpoint and bundle/ of the synthetic shop."""
    folder = tmp_path_factory.mktemp("evaluate")
    sequences = synthetic_sequences()
    data = folder / "data"
    data.mkdir()
    save_sequences(sequences, data)
    write_lines(data / "catalog.jsonl", catalog_rows(sequences, [Product("A", "B", "C", "D", "")] * ITEMS))
    write_lines(data / "histories.jsonl", history_rows(sequences))
    options = Options(
        d_model=32, layers=2, heads=2, head_dim=16, kv_groups=1, kv_layers=1, expert_width=16, max_context=32, epochs=8,
        rows=4, chunk=8, learning_rate=1e-2, beam=16, average_decay=0.9, dropout=0.0, context_dropout=0.0,
    )  # fmt: skip
    train(options, sequences, folder / "run", torch.device("cpu"), log=lambda line: None)
    paths = {"checkpoint": "run/checkpoint", "catalog": "data/catalog.jsonl", "calibration": "data/histories.jsonl"}
    arguments = ["--recipe", "fp8_row", "--device", "cpu", "--quiet", "--out", str(folder / "bundle")]
    for name, path in paths.items():
        arguments += [f"--{name}", str(folder / path)]
    build(BuildConfig.from_command_line(arguments, {}))
    return folder


def test_results_of_the_synthetic_shop(trained: Path) -> None:
    arguments = (trained / "data", trained / "run" / "checkpoint")
    results = evaluate(*arguments, trained / "bundle", beam=24, device="cpu", workers=1, earlier={})
    # Ten of 24 products fit in the list, and a household buys the same four again and again.
    assert results["ours"]["hr@10"] > 0.9 and results["ours"]["random_order"]["hr@10"] > 0.9
    assert results["last_basket"]["ours"]["recall@10"] > 0.9
    assert results["own_repeat"]["hr@10"] == 1.0
    assert {"popularity", "markov", "blend", "own_repeat_decayed"} <= set(results)
    fp8 = results["fp8_vs_bf16"]
    assert fp8["top50_overlap"] == 1.0  # beam 24 lists the whole catalog
    assert abs(fp8["hr@10_relative_change"]) < 0.05
    # One byte for two, and a float32 scale for each row of 16 or 32 inputs.
    assert 0.5 < fp8["weight_bytes_ratio"] < 0.7
    recipes = Bundle.load(trained / "bundle").plan.recipes.values()
    assert fp8["sites_by_recipe"] == {recipe: list(recipes).count(recipe) for recipe in set(recipes)}
    # Without a bundle the FP8 figures of the same checkpoint are kept.
    again = evaluate(*arguments, None, beam=24, device="cpu", workers=1, earlier=results)
    assert again["fp8_vs_bf16"] == fp8 and again["ours"] == results["ours"]


def test_a_bundle_of_another_model_is_refused_first(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.groceries.evaluate.recommend_all", None)
    monkeypatch.setattr("examples.groceries.evaluate.check_version", lambda checkpoint, sequences: {})
    with pytest.raises(GroceriesError, match="bundle: its configuration differs from that of"):
        evaluate(trained / "data", CHECKPOINT, trained / "bundle", beam=24, device="cpu", workers=1, earlier={})


def test_workers_share_the_households(trained: Path) -> None:
    source = Source(trained / "data", trained / "run" / "checkpoint", False, "cpu")
    alone = recommend_all(source, NEXT_BASKET, 8, workers=1)
    shared = recommend_all(source, NEXT_BASKET, 8, workers=2)
    assert len(shared.households) == HOUSEHOLDS
    order = np.argsort(alone.households), np.argsort(shared.households)
    assert np.array_equal(alone.targets[order[0]], shared.targets[order[1]])
    # Other batch shapes may round otherwise, which can swap neighbours: the sets must agree.
    assert np.array_equal(np.sort(alone.items[order[0]]), np.sort(shared.items[order[1]]))
