"""The compact table's kernels against their references and against the dense table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.level_head import reference
from loka_serve.kernels.level_head.reference import AdvancedBeams, TrieLevel
from tests.kernels.devices import DEVICE, compile_for_hopper, needs_triton
from tests.kernels.level_head.cases import Case, make_case, with_distinct_nodes

pytestmark = needs_triton

FIELDS = ("nodes", "codes", "scores", "parents", "counts", "failed")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-5, "equal_nan": True}


def parts(case: Case) -> tuple[TrieLevel, Tensor]:
    assert case.children is not None and case.nodes is not None
    return case.children, case.nodes


def scores_of(case: Case, capacity: int) -> Tensor:
    """By the kernels, over a table of garbage."""
    from loka_serve.kernels.level_head.triton_compact import child_prefix, score_compact

    children, nodes = parts(case)
    prefix = child_prefix(case.beam_counts, children, nodes)
    assert torch.equal(prefix, reference.child_prefix(case.beam_counts, children, nodes))
    out = torch.full((len(nodes), capacity), float("nan"), device=DEVICE)
    found = score_compact(case.logits, case.parent_scores, prefix, children, nodes, case.allowed, capacity, out)
    assert found is out
    return out


def assert_scores_equal(case: Case, more: int = 0) -> None:
    children, nodes = parts(case)
    prefix = reference.child_prefix(case.beam_counts, children, nodes)
    for capacity in (max(int(prefix[:, -1].max()), 1), reference.align_capacity(int(prefix[:, -1].max()) + more)):
        expected = reference.score_compact(
            case.logits, case.parent_scores, case.beam_counts, children, nodes, case.allowed, capacity
        )
        torch.testing.assert_close(scores_of(case, capacity), expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("codes", "children", "filters"),
    [(1, 1, True), (7, 3, False), (130, 130, False), (1500, 1200, True), (8192, 9, True), (16384, 3, False)]
    + [(17000, 60, True)],
)
def test_scores_equal_reference(codes: int, children: int, filters: bool, dtype: torch.dtype) -> None:
    case = make_case(3, 4, codes, DEVICE, dtype, children, filters, parents=20, seed=codes)
    assert_scores_equal(case, more=5000 if codes > 1000 else 70)
    assert_scores_equal(replace(case, parent_scores=None))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("codes", [40, 16400])
@pytest.mark.parametrize("filters", [False, True])
def test_logits_that_are_no_numbers(codes: int, filters: bool) -> None:
    inf, nan = float("inf"), float("nan")
    case = make_case(2, 6, codes, DEVICE, children=30, filters=filters, seed=3)
    case = replace(case, beam_counts=torch.tensor([6, 4], dtype=torch.int32, device=DEVICE))
    parts(case)[1].clamp_(min=1)
    case.logits[0, 5] = nan
    case.logits[1, 7] = inf
    case.logits[2] = -inf
    case.logits[3, ::2] = -inf
    case.logits[4, 1:] = -inf
    case.logits[5] = nan
    case.logits[10:] = nan  # dead beams
    assert_scores_equal(case, more=40)


@pytest.mark.parametrize("children", [1, 40])
def test_candidates_are_those_of_the_dense_table_in_its_order(children: int) -> None:
    from loka_serve.kernels.level_head.triton import score_candidates

    case = make_case(3, 5, 64, DEVICE, children=children, filters=True, seed=children)
    dense = score_candidates(*case.arguments())
    compact = scores_of(case, 256)
    for left, right in zip(dense, compact, strict=True):
        assert torch.equal(left[left.isfinite()], right[right.isfinite()])


def test_what_is_beyond_the_capacity_is_dropped() -> None:
    """Which distinct nodes never need, but other memory is not written to."""
    case = make_case(2, 4, 100, DEVICE, children=90, seed=1)
    whole = scores_of(case, 400)
    assert torch.equal(scores_of(case, 48), whole[:, :48])


@pytest.mark.parametrize("in_sid_order", [False, True])
@pytest.mark.parametrize(
    ("batch", "beams", "codes", "children", "k"),
    [
        (3, 4, 9, 9, 40),
        (1, 1, 300, 300, 100),
        (4, 5, 5000, 400, 33),
        (2, 3, 40, 1, 1),
        (2, 2, 2, 2, 7),
        (3, 33, 9, 2, 9),
    ],
)
def test_beams_equal_reference_and_those_of_the_dense_table(
    batch: int, beams: int, codes: int, children: int, k: int, in_sid_order: bool
) -> None:
    from loka_serve.kernels.level_head.triton_advance import advance_beams

    case = with_distinct_nodes(make_case(batch, beams, codes, DEVICE, children=children, seed=k))
    level, nodes = parts(case)
    capacity = reference.compact_capacity(level.first_child.diff().cpu().numpy(), beams)
    prefix = reference.child_prefix(case.beam_counts, level, nodes)
    row_k = torch.arange(batch, dtype=torch.int32, device=DEVICE) + k - 1
    before = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    before[-1] = 1
    # Few distinct scores, so that ties are everywhere.
    compact = reference.score_compact(
        case.logits, case.parent_scores, case.beam_counts, level, nodes, None, capacity
    ).round()
    dense = reference.score_candidates(*case.arguments()).round()
    for table in (compact, dense):
        table[0, table[0].isfinite().nonzero()[:2]] = float("nan")
    values, indices = reference.topk(compact, k, row_k)
    for failed in (None, before):
        arguments = (values, indices, codes, level, nodes, in_sid_order, failed, prefix)
        found = advance_beams(*arguments)
        assert_beams_equal(found, reference.advance_beams(*arguments))
        chosen = reference.topk(dense, k, row_k)
        assert_beams_equal(found, reference.advance_beams(*chosen, codes, level, nodes, in_sid_order, failed))


def assert_beams_equal(found: AdvancedBeams, expected: AdvancedBeams) -> None:
    for field in FIELDS:
        left, right = getattr(found, field), getattr(expected, field)
        assert left.dtype == right.dtype, field
        torch.testing.assert_close(
            left, right, rtol=0, atol=0, equal_nan=True, msg=lambda text, f=field: f"{f}: {text}"
        )


def test_wrong_arguments_are_named() -> None:
    from loka_serve.kernels.level_head.select import select_level
    from loka_serve.kernels.level_head.triton_advance import advance_beams
    from loka_serve.kernels.level_head.triton_compact import child_prefix, score_compact

    case = make_case(2, 3, 40, DEVICE, children=20)
    children, nodes = parts(case)
    prefix = child_prefix(case.beam_counts, children, nodes)
    with pytest.raises(ValueError, match="beam_counts"):
        child_prefix(case.beam_counts.long(), children, nodes)
    with pytest.raises(ValueError, match="1025 beams"):
        child_prefix(case.beam_counts, children, torch.zeros(2, 1025, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="capacity 0"):
        score_compact(case.logits, None, prefix, children, nodes, None, 0)
    with pytest.raises(ValueError, match="prefix"):
        score_compact(case.logits, None, prefix[:, 1:].contiguous(), children, nodes, None, 64)
    with pytest.raises(ValueError, match="logits"):
        score_compact(case.logits[:4], None, prefix, children, nodes, None, 64)
    with pytest.raises(ValueError, match="out"):
        score_compact(case.logits, None, prefix, children, nodes, None, 64, torch.empty(2, 63, device=DEVICE))
    with pytest.raises(ValueError, match="needs the trie's children"):
        select_level(case.logits, None, case.beam_counts, None, None, None, 3, None, True, capacity=64)
    values, indices = torch.zeros(2, 4, device=DEVICE), torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="prefix"):
        advance_beams(values, indices, 40, None, nodes, True, None, prefix)


def test_no_request() -> None:
    from loka_serve.kernels.level_head.triton_compact import child_prefix, score_compact

    case = make_case(2, 3, 10, DEVICE, children=4)
    children, nodes = parts(case)
    prefix = child_prefix(case.beam_counts[:0], children, nodes[:0])
    assert prefix.shape == (0, 4)
    assert score_compact(case.logits[:0], None, prefix, children, nodes[:0], None, 16).shape == (0, 16)


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.level_head.triton_compact import prefix_kernel, score_compact_kernel

    names = ("beam_counts", "first_child", "nodes", "prefix")
    compile_for_hopper(
        prefix_kernel,
        signature={f"{name}_ptr": "*i32" for name in names} | {"beams": "i32"},
        configurations=[{"BEAMS_PADDED": beams} for beams in (1, 16, 512, 1024)],
    )
    names = ("first_child", "codes", "nodes", "bits", "filtered", "prefix")
    numbers = ("beams", "bits_stride", "capacity", "share")
    compile_for_hopper(
        score_compact_kernel,
        signature={f"{name}_ptr": "*i32" for name in names}
        | {"parent_scores_ptr": "*fp32", "out_ptr": "*fp32"}
        | dict.fromkeys(numbers, "i32"),
        configurations=[
            {"CODES": codes, "BLOCK": block, "CHILDREN": 1024, "HAS_PARENT_SCORES": scored, "num_warps": warps}
            | {"HAS_FILTERS": filters, "logits_ptr": logits}
            for codes, block, warps in ((8192, 8192, 8), (12000, 16384, 16), (40000, 8192, 8))
            for logits, scored in (("*fp32", True), ("*bf16", False))
            for filters in (False, True)
        ],
    )
