"""What a load test expects of an answer beside its status. Imports no locust, whose import patches the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fault_of(answer: Mapping[str, Any], num_items: int) -> str | None:
    """Why an answer of POST /v1/recommend is wrong, or None if it is right."""
    items = answer.get("items")
    if not isinstance(items, list):
        return "no items"
    if len(items) > num_items:
        return f"{len(items)} items, asked for {num_items}"
    if len(items) < num_items and answer.get("complete") is not False:
        return f"{len(items)} items of {num_items}, yet said to be complete"
    item_ids = [item["item_id"] for item in items]
    if len(set(item_ids)) != len(item_ids):
        return "an item twice"
    scores = [item["score"] for item in items]
    if any(not isinstance(score, float) for score in scores):
        return "a score that is no number"
    if scores != sorted(scores, reverse=True):
        return "items not in the order of their scores"
    return None


def beam_mix(num_items: int, default: int, limit: int) -> list[int]:
    """Beam widths that a load test mixes: the narrowest possible, the model's own twice, and a wider one if allowed."""
    least = min(num_items, limit)
    own = max(default, least)
    return [least, own, own, min(2 * own, limit)]
