"""How large the tables of candidates are, by catalog, and which catalogs may take another's place."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from loka_serve.catalog.trie import Trie, compile_trie

pytest.importorskip("triton")
from loka_serve.engines.hopper.buffers import CatalogBuffers, CatalogRoom  # noqa: E402

CPU = torch.device("cpu")

CODES = (40, 50, 400)
BEAMS = (4, 16)


def make_trie(rows: list[tuple[int, int, int]]) -> Trie:
    trie, _ = compile_trie(np.array(rows), codebook_sizes=CODES)
    return trie


def uniform(children: int, roots: int = 10) -> list[tuple[int, int, int]]:
    return [(root, middle, leaf) for root in range(roots) for middle in range(3) for leaf in range(children)]


def test_capacities_are_the_widest_nodes_with_room() -> None:
    widest = [(20, 1, leaf) for leaf in range(100)]
    room = CatalogRoom.of([make_trie(uniform(5) + widest)], 1.5, BEAMS, CODES)
    # 11 roots, aligned to 16, half as much again, aligned.
    assert room.capacity(0, 4) is None and room.capacity(0, 16) is None  # 32 of 40 codes
    assert room.capacity(1, 4) == 32 and room.capacity(1, 16) == 48  # 4 x 3, and 10 x 3 + 1
    assert room.capacity(2, 4) == 192 and room.capacity(2, 16) == 272  # 100 + 3 x 5, and 100 + 15 x 5


def test_a_catalog_with_wider_nodes_does_not_fit_though_it_has_fewer() -> None:
    room = CatalogRoom.of([make_trie(uniform(5))], 1.25, BEAMS, CODES)
    assert room.fits(make_trie(uniform(5)))
    assert room.fits(make_trie(uniform(6)))
    assert room.fits(make_trie(uniform(1)))
    wide = make_trie([(0, 0, leaf) for leaf in range(120)])
    assert all(few <= many for few, many in zip(wide.node_counts, make_trie(uniform(5)).node_counts, strict=True))
    assert not room.fits(wide)
    assert not room.fits(make_trie(uniform(5, roots=40)))


def test_a_dense_table_holds_any_nodes() -> None:
    room = CatalogRoom.of([make_trie(uniform(300))], 1.0, BEAMS, CODES)
    assert room.capacity(2, 4) is None
    assert room.fits(make_trie([(root, 0, leaf) for root in range(10) for leaf in range(400)]))


def test_room_for_two_catalogs_holds_either_with_headroom() -> None:
    many, wide = make_trie(uniform(5)), make_trie([(0, 0, leaf) for leaf in range(120)])
    both = CatalogRoom.of([many, wide], 1.25, BEAMS, CODES)
    for trie in (many, wide, make_trie(uniform(6)), make_trie([(0, 0, leaf) for leaf in range(150)])):
        assert both.fits(trie)
    assert not both.fits(make_trie(uniform(5, roots=40)))


def test_the_bytes_of_a_room_are_what_its_buffers_take() -> None:
    trie = make_trie(uniform(5))
    room = CatalogRoom.of([trie], 1.25, BEAMS, CODES)
    for batch in (1, 3):
        assert CatalogBuffers(trie, room, batch, CPU, 2).bytes == room.bytes(batch)


def test_a_trie_that_cannot_be_converted_leaves_the_last_one_whole() -> None:
    trie, other = make_trie(uniform(5)), make_trie(uniform(4, roots=9))
    buffers = CatalogBuffers(trie, CatalogRoom.of([trie], 1.25, BEAMS, CODES), 1, CPU, 2)
    parts = [part for level in buffers.levels for part in (level.first_child, level.codes)]
    whole = [part.clone() for part in parts]

    class Tokens(np.ndarray[Any, Any]):
        def astype(self, *arguments: Any, **options: Any) -> Any:
            raise MemoryError

    damaged = dataclasses.replace(other, tokens=(*other.tokens[:-1], other.tokens[-1].view(Tokens)))
    with pytest.raises(MemoryError):
        buffers.load(damaged)
    for part, kept in zip(parts, whole, strict=True):
        assert torch.equal(part, kept)
    buffers.load(other)
    assert buffers.levels[0].codes[:9].tolist() == list(range(9))
