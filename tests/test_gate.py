"""The gate's comparison of two rankings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from loka_serve.catalog.catalog import Catalog
from loka_serve.gate import Ranking, compare

BF16 = [[1, 2, 3, 4], [5, 6, 7, 8]]
QUANTIZED = [[1, 3, 2, 9], [6, 5, 7, 8]]


def catalog(items: int = 40) -> Catalog:
    """Each item has a semantic ID of its own, in item order."""
    return Catalog.build(
        item_ids=[f"item-{index}" for index in range(items)],
        semantic_ids=[[index // 10, index % 10] for index in range(items)],
        popularity=[1.0] * items,
        attributes={},
        codebook_sizes=(10, 10),
    )


CATALOG = catalog()


def rankings(items: Sequence[Sequence[int]], first: float = 0.5, step: float = 0.5) -> list[Ranking]:
    """Probabilities `first`, `first` x `step`, ... in order of rank."""
    return [
        Ranking(
            tuple(ranked), tuple(math.log(first) + rank * math.log(step) for rank in range(len(ranked))), tuple(ranked)
        )
        for ranked in items
    ]


def test_agreement_by_hand() -> None:
    result = compare(rankings(QUANTIZED), rankings(BF16), [{2}, set()], CATALOG, top_k=4, min_top_k_overlap=0.875)
    assert result.top_1_agreement == 0.5 and result.top_k_overlap == (3 / 4 + 1) / 2
    # Of two histories a resample takes one twice or each once.
    assert result.top_1_interval == (0.0, 1.0) and result.top_k_interval == (0.75, 1.0)
    assert result.rows == 2 and result.passed
    assert set(result.quality) == {"hit_rate@4", "recall@4", "ndcg@4"}
    assert (result.quality["hit_rate@4"].bf16, result.quality["hit_rate@4"].quantized) == (1.0, 1.0)
    # The only target is second in BF16 and third when quantized: 1 / log2(3) against 1 / log2(4).
    ndcg = result.quality["ndcg@4"]
    assert (ndcg.bf16, ndcg.quantized) == pytest.approx((0.63093, 0.5), abs=1e-5)
    assert ndcg.change == pytest.approx((-0.13093, -0.13093), abs=1e-5)


def test_the_threshold_decides() -> None:
    ours, theirs, targets = rankings(QUANTIZED), rankings(BF16), [set[int](), set[int]()]
    assert not compare(ours, theirs, targets, CATALOG, top_k=4, min_top_k_overlap=0.876).passed
    assert compare(theirs, theirs, targets, CATALOG, top_k=4, min_top_k_overlap=1.0).passed


def test_cutoffs_follow_top_k() -> None:
    result = compare(rankings(BF16), rankings(BF16), [{2}, {9}], CATALOG, top_k=50, min_top_k_overlap=0.5)
    assert [name for name in result.quality if name.startswith("ndcg")] == ["ndcg@5", "ndcg@10", "ndcg@50"]


def test_calibration_by_hand() -> None:
    # BF16 gives the first item .8 and is right both times; quantized .6 and is right once (6 is no target).
    result = compare(
        rankings(QUANTIZED, first=0.6), rankings(BF16, first=0.8), [{1}, {5}], CATALOG, top_k=4, min_top_k_overlap=0
    )
    assert result.calibration.bf16_error == pytest.approx(0.2)
    assert result.calibration.quantized_error == pytest.approx(0.1)
    # Of common items three keep their rank (1, 7, 8), two fall and two rise by one: only the first's change remains.
    assert result.calibration.score_shift == pytest.approx(math.log(0.6 / 0.8))
    distances = [math.log(0.8 / 0.6)] * 3 + [abs(math.log(0.6 / 0.8) + sign * math.log(2)) for sign in (1, 1, -1, -1)]
    assert result.calibration.score_distance == pytest.approx(sum(distances) / 7)


def test_without_targets_there_is_no_quality() -> None:
    result = compare(rankings(QUANTIZED), rankings(BF16), [set(), set()], CATALOG, top_k=4, min_top_k_overlap=0.0)
    assert result.quality == {} and result.calibration.bf16_error is None
    assert any("no held-out history has a target" in warning for warning in result.warnings)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["passed"] is True


def test_few_histories_are_warned_of() -> None:
    few = compare(rankings(BF16), rankings(BF16), [{1}, {5}], CATALOG, top_k=4, min_top_k_overlap=0.5)
    assert [warning.split(":")[0] for warning in few.warnings] == ["2 held-out histories are too few"]
    many = compare(rankings(BF16 * 20), rankings(BF16 * 20), [{1}, {5}] * 20, CATALOG, top_k=4, min_top_k_overlap=0.5)
    assert many.warnings == ()


def test_an_interval_that_holds_the_threshold_is_warned_of() -> None:
    def result(threshold: float) -> tuple[str, ...]:
        arguments = rankings(QUANTIZED * 20), rankings(BF16 * 20), [{1}, {7}] * 20
        return compare(*arguments, CATALOG, top_k=4, min_top_k_overlap=threshold).warnings

    # Overlaps .75 and 1 in equal parts: mean .875, standard error .125 / sqrt(40) = .02, interval .835 to .914.
    (warning,) = result(0.86)
    assert "40 held-out histories do not decide" in warning and "threshold 0.86; about " in warning
    assert 200 < int(warning.split("about ")[1].split()[0]) < 360  # 40 x (.0395 / .015) ** 2 = 277
    assert result(0.8) == ()


def test_recall_that_says_nothing_is_warned_of() -> None:
    def last(ours: list[list[int]], theirs: list[list[int]], target: int) -> str:
        targets = [{target}] * len(ours)
        return compare(rankings(ours), rankings(theirs), targets, CATALOG, top_k=4, min_top_k_overlap=0).warnings[-1]

    assert "none of 40 targets is in BF16's first 4" in last([[1, 2, 3, 4]] * 40, [[1, 2, 3, 4]] * 40, 30)
    # A tenth of the users win the target and a tenth lose it.
    ours = [[1, 2, 3, 4]] * 4 + [[6, 7, 8, 9]] * 36
    theirs = [[6, 7, 8, 9]] * 36 + [[1, 2, 3, 4]] * 4
    warning = last(ours, theirs, 1)
    assert warning.startswith("40 histories with a target are too few for recall@4: its change against BF16 is between")


def test_a_catalog_of_hardly_more_than_k_is_warned_of() -> None:
    result = compare(rankings(BF16 * 20), rankings(BF16 * 20), [{1}, {5}] * 20, catalog(15), 4, min_top_k_overlap=0.5)
    assert [warning.split(":")[0] for warning in result.warnings] == [
        "the catalog has 15 semantic IDs, fewer than 4 x 4"
    ]
