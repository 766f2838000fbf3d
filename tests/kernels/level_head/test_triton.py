"""The kernels against their references: in Triton's interpreter without a GPU, on the GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_serve.kernels.level_head import reference
from loka_serve.kernels.level_head.reference import AdvancedBeams, AllowedNodes
from tests.kernels.devices import DEVICE, compile_for_hopper, needs_triton
from tests.kernels.level_head.cases import Case, make_case

pytestmark = needs_triton

FIELDS = ("nodes", "codes", "scores", "parents", "counts", "failed")
# The sum of exponentials is taken in another order, and a GPU's exponential is good to 2**-21.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-5, "equal_nan": True}


def assert_scores_equal(case: Case) -> None:
    from loka_serve.kernels.level_head.triton import score_candidates

    expected = reference.score_candidates(*case.arguments())
    out = torch.full_like(expected, float("nan"))
    assert score_candidates(*case.arguments(), out) is out
    torch.testing.assert_close(out, expected, **TOLERANCE)


def assert_beams_equal(found: AdvancedBeams, expected: AdvancedBeams) -> None:
    for field in FIELDS:
        left, right = getattr(found, field), getattr(expected, field)
        assert left.dtype == right.dtype, field
        torch.testing.assert_close(
            left, right, rtol=0, atol=0, equal_nan=True, msg=lambda text, f=field: f"{f}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("codes", "children", "filters"),
    [
        (1, 1, True),
        (7, None, False),
        (130, None, False),
        (130, 130, False),
        (1500, 1200, True),
        (8192, 9, True),
        (16384, 3, False),
        (17000, None, False),
        (17000, 60, True),
    ],
)
def test_scores_equal_reference(codes: int, children: int | None, filters: bool, dtype: torch.dtype) -> None:
    case = make_case(3, 4, codes, DEVICE, dtype, children, filters, parents=20, seed=codes)
    assert_scores_equal(case)
    assert_scores_equal(replace(case, parent_scores=None))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("codes", [40, 16400])
@pytest.mark.parametrize("children", [None, 30])
def test_logits_that_are_no_numbers(codes: int, children: int | None) -> None:
    inf, nan = float("inf"), float("nan")
    case = make_case(2, 6, codes, DEVICE, children=children, seed=3)
    case = replace(case, beam_counts=torch.tensor([6, 4], dtype=torch.int32, device=DEVICE))
    if case.nodes is not None:
        case.nodes.clamp_(min=1)
    case.logits[0, 5] = nan
    case.logits[1, 7] = inf
    case.logits[2] = -inf
    case.logits[3, ::2] = -inf
    case.logits[4, 1:] = -inf
    case.logits[5] = nan
    case.logits[10:] = nan  # dead beams
    assert_scores_equal(case)


def test_bits_of_unfiltered_requests_are_not_read() -> None:
    from loka_serve.kernels.level_head.triton import score_candidates

    case = make_case(2, 3, 64, DEVICE, children=40, filters=True)
    assert case.allowed is not None
    unread = AllowedNodes(torch.zeros_like(case.allowed.bits), torch.zeros_like(case.allowed.filtered))
    found = score_candidates(*replace(case, allowed=unread).arguments())
    assert torch.equal(found, score_candidates(*replace(case, allowed=None).arguments()))
    # Rows of a wider buffer.
    wider = torch.cat([case.allowed.bits, torch.full_like(case.allowed.bits, -1)], dim=1)
    strided = AllowedNodes(wider[:, : case.allowed.bits.shape[1]], case.allowed.filtered)
    found = score_candidates(*replace(case, allowed=strided).arguments())
    assert torch.equal(found, score_candidates(*case.arguments()))


@given(st.integers(0, 200), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_packed_bits(nodes: int, seed: int) -> None:
    allowed = np.random.default_rng(seed).random(nodes) < 0.5
    words = reference.pack_allowed(allowed)
    assert words.dtype == np.int32 and len(words) == -(-nodes // 32)
    assert [bool(words[node // 32] >> (node % 32) & 1) for node in range(nodes)] == allowed.tolist()
    assert all(not words[node // 32] >> (node % 32) & 1 for node in range(nodes, 32 * len(words)))


@pytest.mark.parametrize("in_sid_order", [False, True])
@pytest.mark.parametrize(
    ("batch", "beams", "codes", "children", "k"),
    [
        (3, 4, 9, None, 5),
        (3, 4, 9, 9, 40),
        (1, 1, 300, 300, 100),
        (4, 5, 5000, 400, 33),
        (2, 3, 40, 1, 1),
        (2, 2, 2, 2, 7),
    ],
)
def test_beams_equal_reference(
    batch: int, beams: int, codes: int, children: int | None, k: int, in_sid_order: bool
) -> None:
    from loka_serve.kernels.level_head.triton_advance import advance_beams

    case = make_case(batch, beams, codes, DEVICE, children=children, seed=k)
    # Few distinct scores, so that ties are everywhere.
    scores = reference.score_candidates(*case.arguments()).round()
    scores[0, scores[0].isfinite().nonzero()[:2]] = float("nan")
    row_k = torch.arange(batch, dtype=torch.int32, device=DEVICE) + k - 1
    values, indices = reference.topk(scores, k, row_k)
    before = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    before[-1] = 1
    for failed in (None, before):
        arguments = (values, indices, codes, case.children, case.nodes, in_sid_order, failed)
        assert_beams_equal(advance_beams(*arguments), reference.advance_beams(*arguments))


def test_beams_of_no_request_and_no_width() -> None:
    from loka_serve.kernels.level_head.select import select_level
    from loka_serve.kernels.level_head.triton import score_candidates
    from loka_serve.kernels.level_head.triton_advance import advance_beams

    case = make_case(2, 3, 10, DEVICE, children=4)
    nothing = select_level(*case.arguments(), k=0, row_k=None, in_sid_order=True)
    assert nothing.nodes.shape == (2, 0) and nothing.counts.tolist() == [0, 0]
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert score_candidates(case.logits[:0], None, empty, None, None, None).shape == (0, 0)
    beams = advance_beams(empty.view(0, 4).float(), empty.view(0, 4), 10, None, None, True)
    assert beams.nodes.shape == (0, 4) and beams.counts.shape == (0,)


def test_wrong_arguments_are_named() -> None:
    from loka_serve.kernels.level_head.triton import score_candidates
    from loka_serve.kernels.level_head.triton_advance import advance_beams

    case = make_case(2, 3, 40, DEVICE, children=20, filters=True)
    assert case.nodes is not None and case.allowed is not None and case.parent_scores is not None
    short = AllowedNodes(case.allowed.bits[:, :1], case.allowed.filtered)
    wrong = {
        "logits": replace(case, logits=case.logits.double()),
        r"\[2 \* beams": replace(case, logits=case.logits[:5]),
        "beam_counts": replace(case, beam_counts=case.beam_counts.long()),
        "parent_scores": replace(case, parent_scores=case.parent_scores[:, :2]),
        "nodes": replace(case, nodes=case.nodes.long()),
        "nodes: expected the beams' nodes": replace(case, nodes=None),
        "allowed: filters need": replace(case, children=None),
        "allowed.bits": replace(case, allowed=short),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            score_candidates(*arguments.arguments())
    with pytest.raises(ValueError, match="out"):
        score_candidates(*case.arguments(), torch.empty(2, 3, device=DEVICE))
    values, indices = torch.zeros(2, 4, device=DEVICE), torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="k = 2000"):
        advance_beams(torch.zeros(1, 2000), indices, 40, None, None, True)
    with pytest.raises(ValueError, match="indices"):
        advance_beams(values, indices.long(), 40, None, None, True)
    with pytest.raises(ValueError, match="failed"):
        advance_beams(values, indices, 40, None, None, True, values)


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.level_head.triton import score_kernel
    from loka_serve.kernels.level_head.triton_advance import advance_kernel

    names = ("beam_counts", "first_child", "codes", "nodes", "bits", "filtered")
    compile_for_hopper(
        score_kernel,
        signature={f"{name}_ptr": "*i32" for name in names}
        | {"parent_scores_ptr": "*fp32", "out_ptr": "*fp32", "beams": "i32", "bits_stride": "i32"},
        configurations=[
            {"CODES": codes, "BLOCK": block, "CHILDREN": 1024, "HAS_PARENT_SCORES": scored, "num_warps": warps}
            | {"CONSTRAINED": constrained, "HAS_FILTERS": filters, "logits_ptr": logits}
            for codes, block, warps in ((8192, 8192, 8), (12000, 16384, 16), (40000, 8192, 8))
            for logits, scored in (("*fp32", True), ("*bf16", False))
            for constrained, filters in ((False, False), (True, False), (True, True))
        ],
    )
    integers = (
        "indices",
        "first_child",
        "codes",
        "nodes",
        "prefix",
        "failed_before",
        "out_node",
        "out_code",
        "out_parent",
    )
    compile_for_hopper(
        advance_kernel,
        signature={f"{name}_ptr": "*i32" for name in (*integers, "count", "failed")}
        | {"values_ptr": "*fp32", "out_score_ptr": "*fp32", "k": "i32", "beams": "i32"},
        configurations=[
            {"CODES": 8192, "K_PADDED": k, "BEAMS": 32, "CONSTRAINED": constrained, "COMPACT": compact}
            | {"IN_SID_ORDER": constrained, "FAILED_BEFORE": constrained, "PARENTS_PADDED": k if compact else 1}
            for k in (16, 512, 1024)
            for constrained, compact in ((False, False), (True, False), (True, True))
        ],
    )
