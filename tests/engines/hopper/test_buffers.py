"""How large the tables of candidates are, by catalog, and which catalogs may take another's place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loka_serve.catalog.trie import Trie, compile_trie

pytest.importorskip("triton")
from loka_serve.engines.hopper.buffers import TrieBuffers  # noqa: E402

CODES = (40, 50, 400)
BEAMS = (4, 16)


def make_trie(rows: list[tuple[int, int, int]]) -> Trie:
    trie, _ = compile_trie(np.array(rows), codebook_sizes=CODES)
    return trie


def uniform(children: int, roots: int = 10) -> list[tuple[int, int, int]]:
    return [(root, middle, leaf) for root in range(roots) for middle in range(3) for leaf in range(children)]


def test_capacities_are_the_widest_nodes_with_room() -> None:
    widest = [(20, 1, leaf) for leaf in range(100)]
    buffers = TrieBuffers(make_trie(uniform(5) + widest), 1.5, torch.device("cpu"), BEAMS, CODES)
    # 11 roots, aligned to 16, half as much again, aligned.
    assert buffers.capacity(0, 4) is None and buffers.capacity(0, 16) is None  # 32 of 40 codes
    assert buffers.capacity(1, 4) == 32 and buffers.capacity(1, 16) == 48  # 4 x 3, and 10 x 3 + 1
    assert buffers.capacity(2, 4) == 192 and buffers.capacity(2, 16) == 272  # 100 + 3 x 5, and 100 + 15 x 5


def test_a_catalog_with_wider_nodes_does_not_fit_though_it_has_fewer() -> None:
    buffers = TrieBuffers(make_trie(uniform(5)), 1.25, torch.device("cpu"), BEAMS, CODES)
    assert buffers.fits(make_trie(uniform(5)))
    assert buffers.fits(make_trie(uniform(6)))
    assert buffers.fits(make_trie(uniform(1)))
    wide = make_trie([(0, 0, leaf) for leaf in range(120)])
    assert all(few <= many for few, many in zip(wide.node_counts, make_trie(uniform(5)).node_counts, strict=True))
    assert not buffers.fits(wide)
    assert not buffers.fits(make_trie(uniform(5, roots=40)))


def test_a_dense_table_holds_any_nodes() -> None:
    buffers = TrieBuffers(make_trie(uniform(300)), 1.0, torch.device("cpu"), BEAMS, CODES)
    assert buffers.capacity(2, 4) is None
    assert buffers.fits(make_trie([(root, 0, leaf) for root in range(10) for leaf in range(400)]))
