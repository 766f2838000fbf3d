"""From what a client wrote to what the engine computes: names become indices, defaults are filled in, limits hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loka_serve.catalog.attributes import AttributeColumn, Scalar, attribute_text
from loka_serve.catalog.catalog import Catalog
from loka_serve.models.config import OneRecV2Config
from loka_serve.server.messages import WireRequest, pack_integers
from loka_serve.server.problems import invalid
from loka_serve.server.schemas import RecommendRequest

DEFAULT_ITEMS = 20
RESERVED_FIELDS = frozenset({"item_id", "score", "semantic_id", "rank"})


@dataclass(frozen=True)
class ServedModel:
    """The model as requests see it, fixed while the server runs.

    Attributes:
        max_batch: requests that are computed together.
        max_beam_width: widest beam of a request.
        max_context: items of a history that are used.
        beam_width: beams of a request that names none.
    """

    name: str
    config: OneRecV2Config
    max_batch: int
    max_beam_width: int
    max_context: int
    beam_width: int

    @cached_property
    def feature_indices(self) -> dict[str, dict[str, int]]:
        """feature -> value -> index; 0 is left for unknown."""
        return {
            feature.name: {value: index for index, value in enumerate(feature.values, start=1)}
            for feature in self.config.features
        }


@dataclass(frozen=True)
class ResolvedRequest:
    """A request that the engine can take, and what its answer needs to know.

    Attributes:
        history_length: items that the model sees.
        unknown_items: items of the history that the catalog does not have.
        fields: attributes to answer with.
        timeout_ms: from arrival; None for the server's default.
        priority: `interactive` or `bulk`.
    """

    wire: WireRequest
    catalog: Catalog
    history_length: int
    unknown_items: int
    fields: tuple[str, ...]
    timeout_ms: float | None
    priority: str


def resolve(request: RecommendRequest, model: ServedModel, catalog: Catalog) -> ResolvedRequest:
    """Check a request against the model and the catalog.

    Raises:
        ProblemError: 422 naming the field.
    """
    num_items, beam_width = _widths(request, model)
    items, codes = _history(request, model, catalog)
    excluded = [_known_items(request.exclude, catalog)]
    if request.exclude_history:
        excluded.append(items if request.history_sids is None else _items_at(codes, catalog))
    history = codes[-model.max_context :]
    return ResolvedRequest(
        wire=WireRequest(
            history=pack_integers(history),
            features=_features(request.features, model),
            beam_width=beam_width,
            num_items=num_items,
            exclude=pack_integers(np.unique(np.concatenate(excluded))),
            predicates=_predicates(request, catalog),
        ),
        catalog=catalog,
        history_length=len(history),
        unknown_items=len(request.history or []) - len(items),
        fields=_fields(request.fields, catalog),
        timeout_ms=request.timeout_ms,
        priority=request.priority,
    )


def _widths(request: RecommendRequest, model: ServedModel) -> tuple[int, int]:
    """(num_items, beam_width)."""
    limit = model.max_beam_width
    num_items = min(DEFAULT_ITEMS, limit) if request.num_items is None else request.num_items
    if num_items > limit:
        raise invalid("num_items", f"expected 1 to {limit}, got {num_items}")
    if request.beam_width is None:
        return num_items, min(max(model.beam_width, num_items), limit)
    if request.beam_width > limit:
        raise invalid("beam_width", f"expected 1 to {limit}, got {request.beam_width}")
    if request.beam_width < num_items:
        raise invalid("beam_width", f"expected at least num_items = {num_items}, got {request.beam_width}")
    return num_items, request.beam_width


def _known_items(item_ids: Sequence[str], catalog: Catalog) -> NDArray[np.int64]:
    """The indices of these items, without those that the catalog does not have."""
    indices = catalog.indices_of(item_ids)
    return indices[indices >= 0]


def _history(
    request: RecommendRequest, model: ServedModel, catalog: Catalog
) -> tuple[NDArray[np.int64], NDArray[np.integer[Any]]]:
    """Item indices of all of the history that is known, and codes [n, levels], oldest first.

    Of a history of items, only the codes of those that the model may see; of one of semantic IDs, no indices.
    """
    if request.history is not None:
        if request.history_sids is not None:
            raise invalid("history_sids", "expected either history or history_sids, got both")
        items = _known_items(request.history, catalog)
        return items, catalog.semantic_ids(items[-model.max_context :])
    if request.history_sids is None:
        raise invalid("history", "expected history or history_sids (empty for a new user), got neither")
    return np.empty(0, np.int64), _codes(request.history_sids, model.config.codebook_sizes)


def _codes(semantic_ids: Sequence[Sequence[int]], sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """int64 [n, levels]: semantic IDs checked against the codebooks, without a Python loop, as there may be many."""
    count, levels = len(semantic_ids), len(sizes)
    lengths = np.fromiter(map(len, semantic_ids), np.int64, count)
    for position in np.flatnonzero(lengths != levels)[:1]:
        raise invalid(f"history_sids[{position}]", f"expected {levels} codes, got {lengths[position]}")
    codes = np.fromiter(chain.from_iterable(semantic_ids), np.int64, count * levels).reshape(count, levels)
    for position, level in np.argwhere(codes >= np.array(sizes))[:1]:
        expected = f"expected 0 to {sizes[level] - 1}, got {codes[position, level]}"
        raise invalid(f"history_sids[{position}][{level}]", expected)
    return codes


def _items_at(semantic_ids: NDArray[np.integer[Any]], catalog: Catalog) -> NDArray[np.int64]:
    """All items of these semantic IDs; those that are not in the catalog have none."""
    leaves = np.unique(catalog.trie.leaves_of(semantic_ids))
    leaves = leaves[leaves >= 0]
    begins, ends = catalog.trie.item_offsets[leaves], catalog.trie.item_offsets[leaves + 1]
    # The n-th item of all is item begins[l] + (n - items of the leaves before l) of its leaf l.
    before = np.cumsum(ends - begins) - (ends - begins)
    return np.arange(int((ends - begins).sum())) + np.repeat(begins - before, ends - begins)


def _features(given: dict[str, str], model: ServedModel) -> list[int]:
    known = model.feature_indices
    for name in given:
        if name not in known:
            raise invalid(f"features.{name[:100]}", f"unknown feature; known features: {_join(known)}")
    return [indices.get(given[name], 0) if name in given else 0 for name, indices in known.items()]


def _predicates(request: RecommendRequest, catalog: Catalog) -> dict[str, list[str]]:
    attributes = catalog.attributes
    for name in request.filter:
        if name not in attributes:
            raise invalid(f"filter.{name[:100]}", f"unknown attribute; known attributes: {_join(attributes)}")
    return {name: _known_values(values, attributes[name]) for name, values in request.filter.items()}


def _known_values(values: Sequence[Scalar], column: AttributeColumn) -> list[str]:
    """The texts of the values that some item has, each once; the others match nothing."""
    known = column.code_of
    return [text for text in dict.fromkeys(attribute_text(value)[0] for value in values) if text in known]


def _fields(names: Sequence[str], catalog: Catalog) -> tuple[str, ...]:
    attributes = catalog.attributes
    for position, name in enumerate(names):
        if name not in attributes or name in RESERVED_FIELDS:
            known = [attribute for attribute in attributes if attribute not in RESERVED_FIELDS]
            raise invalid(f"fields[{position}]", f"unknown attribute; known attributes: {_join(known)}")
    return tuple(dict.fromkeys(names))


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
