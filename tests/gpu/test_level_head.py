"""A level's selection on the GPU at production shapes: against its reference, `beam_search.select` and in a graph."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from loka_serve.decoding.beam_search import Beams, select
from loka_serve.decoding.trie_tensors import TrieTensors
from loka_serve.kernels.level_head import reference
from loka_serve.kernels.level_head.reference import AdvancedBeams, TrieLevel
from tests.kernels.level_head.cases import Case, make_allowed, make_case, with_distinct_nodes

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from loka_serve.kernels.level_head.select import select_level
from loka_serve.kernels.level_head.triton import score_candidates
from loka_serve.kernels.level_head.triton_advance import advance_beams
from loka_serve.kernels.level_head.triton_compact import child_prefix, score_compact

FIELDS = ("nodes", "codes", "scores", "parents", "counts", "failed")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-5, "equal_nan": True}


def assert_same(found: AdvancedBeams, expected: AdvancedBeams) -> None:
    for field in FIELDS:
        left, right = getattr(found, field), getattr(expected, field)
        torch.testing.assert_close(
            left, right, rtol=0, atol=0, equal_nan=True, msg=lambda text, f=field: f"{f}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("codes", "children", "filters"),
    [
        (8192, None, False),
        (8192, 2500, False),
        (8192, 2500, True),
        (8192, 3, True),
        (8191, 700, True),
        (16384, None, False),
        (32768, 3000, True),
        (32768, None, False),
    ],
)
def test_scores_equal_reference(codes: int, children: int | None, filters: bool, dtype: torch.dtype) -> None:
    case = make_case(4, 512, codes, "cuda", dtype, children, filters, parents=300)
    expected = reference.score_candidates(*case.arguments())
    # A race between the stores of -inf and those of the scores would show in some of the 2048 rows.
    for _ in range(3):
        out = torch.full_like(expected, float("nan"))
        torch.testing.assert_close(score_candidates(*case.arguments(), out), expected, **TOLERANCE)


def capacity_of(level: TrieLevel, beams: int) -> int:
    return reference.compact_capacity(level.first_child.diff().cpu().numpy(), beams)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("codes", "children", "filters"),
    [(8192, 2500, False), (8192, 2500, True), (8192, 3, True), (8191, 700, True), (32768, 3000, True)],
)
def test_compact_scores_equal_reference(codes: int, children: int, filters: bool, dtype: torch.dtype) -> None:
    case = with_distinct_nodes(make_case(4, 512, codes, "cuda", dtype, children, filters, parents=1000))
    level, nodes = case.children, case.nodes
    assert level is not None and nodes is not None
    capacity = capacity_of(level, 512)
    prefix = child_prefix(case.beam_counts, level, nodes)
    assert torch.equal(prefix, reference.child_prefix(case.beam_counts, level, nodes))
    assert int(prefix.max()) <= capacity
    expected = reference.score_compact(
        case.logits, case.parent_scores, case.beam_counts, level, nodes, case.allowed, capacity
    )
    out = torch.full_like(expected, float("nan"))
    score_compact(case.logits, case.parent_scores, prefix, level, nodes, case.allowed, capacity, out)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    dense = score_candidates(*case.arguments())
    for left, right in zip(dense, out, strict=True):  # the same sums, so the same bits
        assert torch.equal(left[left.isfinite()], right[right.isfinite()])


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize(("children", "k"), [(3, 512), (40, 1024), (2500, 512), (2500, 1000)])
def test_compact_table_gives_the_beams_of_the_dense_one(children: int, k: int, filters: bool) -> None:
    """Bit for bit, with scores of few distinct values."""
    case = with_distinct_nodes(make_case(6, 512, 8192, "cuda", torch.float32, children, filters, parents=5000))
    assert case.children is not None and case.parent_scores is not None
    case.logits.copy_(torch.zeros_like(case.logits))
    case.parent_scores.copy_(case.parent_scores.round())
    case.logits[5, 0] = float("nan")
    row_k = torch.tensor([k, 1, k, 100, 511, k], dtype=torch.int32, device="cuda")
    for in_sid_order in (False, True):
        dense, compact = (
            select_level(*case.arguments(), k, row_k, in_sid_order, capacity=capacity)
            for capacity in (None, capacity_of(case.children, 512))
        )
        assert_same(compact, dense)


def test_scores_do_not_depend_on_the_batch() -> None:
    case = make_case(8, 512, 8192, "cuda", children=1000)
    found = score_candidates(*case.arguments())
    assert case.parent_scores is not None and case.nodes is not None
    for request in range(8):
        rows = slice(request, request + 1)
        alone = Case(
            case.logits[512 * request : 512 * (request + 1)],
            case.parent_scores[rows],
            case.beam_counts[rows],
            case.children,
            case.nodes[rows],
            None,
        )
        assert torch.equal(score_candidates(*alone.arguments()), found[rows])


@pytest.mark.parametrize("in_sid_order", [False, True])
@pytest.mark.parametrize(("children", "k"), [(None, 512), (2500, 512), (2500, 1024), (3, 512), (3, 1000)])
def test_beams_equal_reference(children: int | None, k: int, in_sid_order: bool) -> None:
    case = make_case(6, 512, 8192, "cuda", children=children, parents=300)
    scores = reference.score_candidates(*case.arguments()).round()
    scores[2, scores[2].isfinite().nonzero()[:3]] = float("nan")
    row_k = torch.tensor([k, 1, k, 100, 511, k], dtype=torch.int32, device="cuda")
    values, indices = reference.topk(scores, k, row_k)
    arguments = (values, indices, 8192, case.children, case.nodes, in_sid_order, None)
    assert_same(advance_beams(*arguments), reference.advance_beams(*arguments))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("children", [3, 2500])
def test_equals_beam_search(children: int, filters: bool, compact: bool) -> None:
    batch, width, codes = 4, 512, 8192
    case = with_distinct_nodes(make_case(batch, width, codes, "cuda", children=children, parents=5000))
    level, nodes = case.children, case.nodes
    assert level is not None and nodes is not None and case.parent_scores is not None
    capacity = capacity_of(level, width) if compact else None
    allowed = make_allowed(batch, len(level.codes), "cuda", 0) if filters else None
    mask = None
    if allowed is not None:
        bits = (allowed.bits[:, :, None] >> torch.arange(32, device="cuda")) & 1
        mask = (bits.flatten(1)[:, : len(level.codes)] != 0) | (allowed.filtered == 0)[:, None]
    row_k = torch.tensor([512, 17, 512, 100], dtype=torch.int32, device="cuda")
    trie = TrieTensors((torch.zeros(5000), level.codes.long()), (level.first_child.long(),))
    beams = Beams(nodes.long(), case.parent_scores, torch.zeros_like(nodes), torch.zeros(batch, device="cuda").bool())
    for last in (False, True):
        expected = select(
            case.logits.view(batch, width, codes), beams, trie, 1, row_k.long(), mask, in_score_order=last
        )
        arguments = case.logits, case.parent_scores, case.beam_counts, level, nodes, allowed, width, row_k, not last
        found = select_level(*arguments, capacity=capacity)
        for request, count in enumerate(found.counts.tolist()):
            assert count == int((expected.nodes[request] >= 0).sum())
            columns = found.nodes[request, :count].long(), expected.nodes[request, :count]
            # Rows' sums of exponentials differ in the last bit, so scores this close may change places.
            if last:
                assert int((columns[0] != columns[1]).sum()) <= 4
                scores = found.scores[request, :count], expected.scores[request, :count]
                torch.testing.assert_close(*scores, **TOLERANCE)
            else:
                assert torch.equal(columns[0], columns[0].sort().values)
                assert int(torch.isin(*columns, invert=True).sum()) <= 2
            owners = torch.searchsorted(level.first_child.long(), columns[0], right=True) - 1
            parents = found.parents[request, :count].long()
            assert torch.equal(nodes[request, parents].long(), owners)
            assert torch.equal(found.codes[request, :count], level.codes[columns[0]])


@pytest.mark.parametrize("compact", [False, True])
def test_one_graph_serves_every_batch(compact: bool) -> None:
    """Counts, nodes, filters and widths change between replays; shapes do not."""
    children = make_case(1, 1, 8192, "cuda", children=1500, parents=300).children
    assert isinstance(children, TrieLevel)
    capacity = capacity_of(children, 256) if compact else None

    def tensors(seed: int) -> list[torch.Tensor]:
        case = with_distinct_nodes(make_case(3, 256, 8192, "cuda", children=1, parents=300, seed=seed), seed)
        allowed = make_allowed(3, len(children.codes), "cuda", seed)
        assert case.parent_scores is not None and case.nodes is not None
        row_k = torch.randint(1, 257, (3,), dtype=torch.int32, device="cuda")
        failed = torch.randint(0, 2, (3,), dtype=torch.int32, device="cuda")
        return [case.logits, case.parent_scores, case.beam_counts, case.nodes, *vars(allowed).values(), row_k, failed]

    def run(held: list[torch.Tensor]) -> AdvancedBeams:
        logits, scores, counts, nodes, bits, filtered, row_k, failed = held
        allowed = reference.AllowedNodes(bits, filtered)
        arguments = logits, scores, counts, children, nodes, allowed, 256, row_k, True, failed
        return select_level(*arguments, capacity=capacity)

    held = tensors(0)
    run(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(held)
    for seed in range(1, 6):
        for target, source in zip(held, tensors(seed), strict=True):
            target.copy_(source)
        for field in FIELDS:
            getattr(found, field).fill_(77)
        graph.replay()
        assert_same(found, run(held))
        held[0].fill_(float("nan"))
        graph.replay()
        assert found.scores.isnan().any()
        assert_same(found, run(held))
