"""From item indices and scores to what the client reads."""

from __future__ import annotations

from typing import Any

from loka_serve.server.flights import Answer
from loka_serve.server.messages import unpack_integers, unpack_scores
from loka_serve.server.resolution import ResolvedRequest


def recommend_answer(
    resolved: ResolvedRequest, answer: Answer, model: str, request_id: str, total_seconds: float
) -> dict[str, Any]:
    """The members of schemas.RecommendResponse."""
    return {
        "request_id": request_id,
        "model": model,
        "catalog_version": resolved.catalog.version,
        "items": _items(resolved, answer),
        "complete": answer.result.complete,
        "usage": {
            "history_length": resolved.history_length,
            "unknown_items": resolved.unknown_items,
            "beam_width": resolved.wire.beam_width,
            "batch_size": answer.batch.size,
            "queue_ms": _milliseconds(answer.queue_seconds),
            "engine_ms": _milliseconds(answer.batch.engine_seconds),
            "total_ms": _milliseconds(total_seconds),
        },
    }


def _items(resolved: ResolvedRequest, answer: Answer) -> list[dict[str, Any]]:
    catalog = resolved.catalog
    columns = [(name, catalog.attributes[name]) for name in resolved.fields]
    indices = unpack_integers(answer.result.items)
    scores = unpack_scores(answer.result.scores).tolist()
    semantic_ids = catalog.semantic_ids(indices).tolist()
    items = []
    for rank, (index, score, semantic_id) in enumerate(zip(indices.tolist(), scores, semantic_ids, strict=True), 1):
        item = {"item_id": catalog.item_ids[index], "score": score, "semantic_id": semantic_id, "rank": rank}
        for name, column in columns:
            item[name] = column.value_of(index)
        items.append(item)
    return items


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
