"""The committed checkpoint and results.json belong together, and keep what the example promises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.groceries.evaluate import CHECKPOINT, RESULTS, Source, checkpoint_digest
from examples.groceries.open_basket import BASKET_ITEMS, OPEN_BASKET
from examples.groceries.prepare import Sequences, save_sequences
from examples.groceries.purchases import GroceriesError
from examples.groceries.records import Committed
from examples.groceries.scoring import MISSED, Recommendations
from examples.groceries.spot_check import compare, spot_check
from loka_serve.models.checkpoint import load_config
from tests.examples.groceries.data import synthetic_sequences

RESULTS_HELD: dict[str, Any] = json.loads(RESULTS.read_text())


def test_the_results_are_of_the_committed_checkpoint() -> None:
    assert RESULTS_HELD["environment"]["checkpoint"] == checkpoint_digest(CHECKPOINT)
    training = json.loads((CHECKPOINT / "training.json").read_text())
    assert RESULTS_HELD["environment"]["validation"] == training["best"]["validation"]


def test_no_path_of_any_machine_is_committed() -> None:
    for path in (RESULTS, CHECKPOINT / "training.json", CHECKPOINT / "config.json"):
        assert not re.search(r'(^|[\s"=])(/|~/|\.\.?/|[A-Z]:\\)', path.read_text()), path


def test_the_committed_checkpoint_takes_the_open_basket() -> None:
    features = load_config(CHECKPOINT).features
    assert features[0] == OPEN_BASKET and features[-1] == BASKET_ITEMS


def test_the_results_keep_the_promises() -> None:
    ours, basket, fp8 = RESULTS_HELD["ours"], RESULTS_HELD["last_basket"]["ours"], RESULTS_HELD["fp8_vs_bf16"]
    assert ours["hr@10"] >= 0.195 and ours["ndcg@10"] >= 0.115
    assert basket["recall@10"] >= 0.155 and basket["ndcg@10"] >= 0.170
    for name in ("popularity", "markov", "own_repeat", "own_repeat_decayed", "blend"):
        for metric in ("hr@10", "ndcg@10"):
            baseline = RESULTS_HELD[name]
            assert ours[metric] > baseline[metric]
            assert ours["random_order"][metric] > baseline["random_order"][metric]
            assert ours["random_order_uncounted"][metric] > baseline["random_order"][metric]
    assert abs(fp8["hr@10_relative_change"]) <= 0.01
    assert fp8["top50_overlap"] >= 0.90 and fp8["weight_bytes_ratio"] <= 0.55


def test_noise_is_told_from_a_difference() -> None:
    items = np.arange(64)[None].repeat(400, axis=0)
    targets = np.where(np.arange(400) % 4 == 0, 3, MISSED)  # a hit at every fourth position
    recommended = Recommendations(items, targets, np.arange(400) // 8)
    near = compare("order", recommended, 0.26)
    assert near.agrees and near.measured == 0.25 and near.households == 50 and "agrees" in str(near)
    assert near.standard_error == pytest.approx(np.sqrt(0.26 * 0.74 / 400))
    far = compare("order", recommended, 0.4)
    assert not far.agrees and "DIFFERS" in str(far)


def test_results_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(GroceriesError, match="the results are of"):
        spot_check(Source(tmp_path, tmp_path, False, "cpu"), tmp_path, Committed.read(RESULTS), 1)


@pytest.mark.parametrize("is_bundle", [False, True])
def test_data_with_other_semantic_ids_is_refused(tmp_path: Path, is_bundle: bool) -> None:
    save_sequences(synthetic_sequences(), tmp_path)
    source = Source(tmp_path, tmp_path if is_bundle else CHECKPOINT, is_bundle, "cpu")
    with pytest.raises(GroceriesError, match=r"training\.json: trained on semantic IDs of version"):
        spot_check(source, CHECKPOINT, Committed.read(RESULTS), 1)


def test_the_committed_checkpoint_gives_the_committed_figures(prepared: tuple[Path, Sequences]) -> None:
    for comparison in spot_check(
        Source(prepared[0], CHECKPOINT, False, "cpu"), CHECKPOINT, Committed.read(RESULTS), 40
    ):
        assert comparison.agrees, str(comparison)
        assert comparison.standard_error < 0.05
