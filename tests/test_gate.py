"""The gate's comparison of two rankings."""

from __future__ import annotations

import json

import pytest

from loka_serve.gate import compare

BF16 = [[1, 2, 3, 4], [5, 6, 7, 8]]
QUANTIZED = [[1, 3, 2, 9], [6, 5, 7, 8]]


def test_agreement_by_hand() -> None:
    result = compare(QUANTIZED, BF16, [{2}, set()], top_k=4, min_top_k_overlap=0.875)
    assert result.top_1_agreement == 0.5 and result.top_k_overlap == (3 / 4 + 1) / 2
    assert result.rows == 2 and result.passed
    assert set(result.quality) == {"hit_rate@4", "recall@4", "ndcg@4"}
    assert result.quality["hit_rate@4"] == {"bf16": 1.0, "quantized": 1.0}
    # The only target is second in BF16 and third when quantized: 1 / log2(3) against 1 / log2(4).
    assert result.quality["ndcg@4"] == pytest.approx({"bf16": 0.63093, "quantized": 0.5}, abs=1e-5)


def test_the_threshold_decides() -> None:
    assert not compare(QUANTIZED, BF16, [set(), set()], top_k=4, min_top_k_overlap=0.876).passed
    assert compare(BF16, BF16, [set(), set()], top_k=4, min_top_k_overlap=1.0).passed


def test_cutoffs_follow_top_k() -> None:
    result = compare(BF16, BF16, [{2}, {9}], top_k=50, min_top_k_overlap=0.5)
    assert [name for name in result.quality if name.startswith("ndcg")] == ["ndcg@5", "ndcg@10", "ndcg@50"]


def test_without_targets_there_is_no_quality() -> None:
    result = compare(QUANTIZED, BF16, [set(), set()], top_k=4, min_top_k_overlap=0.0)
    assert result.quality == {}
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["passed"] is True
