"""Gathering, SwiGLU and groups of sorted rows; DeepGEMM's part by a stand-in that does what it documents."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.moe import reference
from loka_serve.kernels.moe.reference import SortedRows
from loka_serve.kernels.quantize.reference import expand_row_blocks, quantize_row_blocks_e4m3
from tests.kernels.devices import DEVICE, assert_codes_close, compile_for_hopper, needs_triton
from tests.kernels.moe.cases import LOADS, make_logits, make_rows, make_weights, quantize_inputs

pytestmark = needs_triton

EXPERTS, TOP_K = 5, 2


def sort(tokens: int, load: str, block_m: int) -> SortedRows:
    """Sorted rows as the kernel leaves them: unneeded blocks hold anything."""
    logits = make_logits(tokens, EXPERTS, load, DEVICE)
    selected, _ = reference.route(logits, torch.zeros(EXPERTS, device=DEVICE), TOP_K)
    rows = reference.sort_rows(selected, EXPERTS, block_m)
    rows.tokens[int(rows.block_count) * block_m :] = 1 << 30
    return rows


def used_of(rows: SortedRows) -> Tensor:
    return (rows.tokens >= 0) & (rows.expert_of_block >= 0).repeat_interleave(rows.block_m)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_row", "fp8_block"])
@pytest.mark.parametrize("load", ["skewed", "one expert"])
def test_gather(recipe: str, load: str) -> None:
    from loka_serve.kernels.moe.sorted_rows import gather_rows

    rows = sort(23, load, 16)
    x, scale = quantize_inputs(make_rows(23, 192, DEVICE), recipe)
    out, out_scale = gather_rows(x, scale, rows)
    used = used_of(rows)
    source = rows.tokens[used].long()
    assert torch.equal(out.float()[used], x.float()[source])
    if scale is None:
        assert out_scale is None
    else:
        assert out_scale is not None and torch.equal(out_scale[used], scale[source])
        assert recipe == "fp8_row" or out_scale.stride() == (1, len(rows.tokens))


@pytest.mark.parametrize("width", [128, 192])
def test_swiglu(width: int) -> None:
    from loka_serve.kernels.moe.sorted_rows import sorted_swiglu

    rows = sort(23, "skewed", 16)
    used = used_of(rows)
    gate_up = make_rows(len(rows.tokens), 2 * width, DEVICE)
    gate_up[~used] = float("nan")
    gate, up = gate_up.float().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    hidden, none = sorted_swiglu(gate_up, rows, quantize=False)
    assert none is None
    torch.testing.assert_close(hidden[used].float(), expected[used], rtol=2**-8, atol=2**-20)
    codes, scale = sorted_swiglu(gate_up, rows, quantize=True)
    assert scale is not None
    expected_codes, expected_scale = quantize_row_blocks_e4m3(expected)
    torch.testing.assert_close(scale[used], expected_scale[used], rtol=1e-5, atol=0)
    assert_codes_close(codes[used], expected_codes[used])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("tokens", "block_m"), [(1, 16), (40, 16), (70, 64)])
def test_groups(load: str, tokens: int, block_m: int) -> None:
    from loka_serve.kernels.moe.sorted_rows import group_ends, row_experts

    rows = sort(tokens, load, block_m)
    used = used_of(rows)
    owner = torch.where(used, rows.expert_of_block.repeat_interleave(block_m), -1)
    assert torch.equal(row_experts(rows), owner.int())
    start, expected = 0, []
    for expert in range(EXPERTS):
        count = int((owner == expert).sum())
        expected.append(start + count)
        start += -(-count // block_m) * block_m
    assert group_ends(rows, EXPERTS).tolist() == expected


def test_more_blocks_than_one_step() -> None:
    from loka_serve.kernels.moe.sorted_rows import group_ends

    owner = torch.arange(300, device=DEVICE, dtype=torch.int32) // 100
    tokens = torch.zeros(300 * 16, dtype=torch.int32, device=DEVICE)
    tokens[200 * 16 - 3 : 200 * 16] = -1
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ends = group_ends(SortedRows(tokens, owner, none, none, 16), 4)
    assert ends.tolist() == [1600, 3197, 4800, 4800]


class StandIn:
    """DeepGEMM's contiguous grouped GEMMs in PyTorch, which compute every row's expert from what they are given."""

    calls = 0

    def _experts(self, rows: int, groups: Tensor, use_psum_layout: bool) -> Tensor:
        if not use_psum_layout:
            assert groups.shape == (rows,)
            return groups
        experts, start = torch.full((rows,), -1, device=groups.device), 0
        for expert, end in enumerate(groups.tolist()):
            experts[start:end] = expert
            start = -(-end // 128) * 128
        return experts

    def m_grouped_bf16_gemm_nt_contiguous(
        self, a: Tensor, b: Tensor, d: Tensor, groups: Tensor, use_psum_layout: bool = False
    ) -> None:
        self.calls += 1
        experts = self._experts(len(a), groups, use_psum_layout)
        for expert in range(len(b)):
            d[experts == expert] = (a[experts == expert].float() @ b[expert].float().T).bfloat16()

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, d: Tensor, groups: Tensor, use_psum_layout: bool = False
    ) -> None:
        (codes, scale), (weight, weight_scale) = a, b
        assert scale.stride(0) == 1 and scale.stride(1) % 4 == 0
        values = codes.float() * expand_row_blocks(scale, codes.shape[1])
        wide = weight_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        weights = weight.float() * wide[:, : weight.shape[1], : weight.shape[2]]
        experts = self._experts(len(codes), groups, use_psum_layout)
        self.calls += 1
        for expert in range(len(weight)):
            d[experts == expert] = (values[experts == expert] @ weights[expert].T).bfloat16()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("mixed", [None, "gate_up", "down"])
def test_block_by_the_library(monkeypatch: pytest.MonkeyPatch, recipe: str, ends: bool, mixed: str | None) -> None:
    from loka_serve.kernels.moe import libraries
    from loka_serve.kernels.moe.block import moe_block
    from loka_serve.kernels.moe.configurations import Configuration
    from loka_serve.kernels.moe.experts import Tiling

    library = StandIn()
    monkeypatch.setattr(libraries, "deep_gemm", lambda: library)
    x, scale = quantize_inputs(make_rows(20, 192, DEVICE), recipe)
    weights = make_weights(EXPERTS + 1, 192, 128, recipe, DEVICE)
    logits = make_logits(20, EXPERTS, "skewed", DEVICE)
    uses: dict[str, Any] = dict.fromkeys(("gate_up", "down"), libraries.DeepGemm(ends))
    if mixed:
        uses[mixed] = Tiling(128, 4, 2)
    arguments = (x, scale, logits, torch.zeros(EXPERTS, device=DEVICE), weights, TOP_K)
    out = moe_block(*arguments, configuration=Configuration(**uses))
    expected = reference.moe_block(*arguments)
    assert library.calls == (1 if mixed else 2)
    # Gate and up are rounded to bfloat16 besides, which moves some activated codes to their neighbours, 1/16 on average
    # of their value: much in a row of 128 whose largest code is among them.
    error = (out.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    assert error.max() < (2**-7 if recipe == "bf16" else 2**-4) and error.mean() < 2**-6


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from loka_serve.kernels.moe import libraries
    from loka_serve.kernels.moe.configurations import Configuration, Table, choose_configuration
    from loka_serve.kernels.moe.cuda import WarpSpecialized
    from loka_serve.kernels.moe.experts import Tiling, expert_linear

    library, own = libraries.DeepGemm(), Tiling(128, 8, 3)
    table: Table = ((4, Configuration(library, own)), (4, Configuration(own, own)), (9, Configuration(own, library)))
    assert choose_configuration(8, 2, True, library=True, table=table).library == library
    assert choose_configuration(8, 2, True, library=False, table=table).library is None
    assert choose_configuration(18, 2, True, library=True, table=table).down == library
    specialized = Configuration(WarpSpecialized(), library)
    table = ((9, specialized), *table)
    assert choose_configuration(8, 2, True, library=True, warp_specialized=True, table=table) == specialized
    assert choose_configuration(8, 2, True, library=True, table=table).gate_up == library
    with pytest.raises(ValueError, match="blocks of 128 rows, down of 64"):
        Configuration(own, replace(own, block_m=64))
    with pytest.raises(ValueError, match="in two ways"):
        Configuration(library, libraries.DeepGemm(ends=False))

    monkeypatch.setattr(libraries, "deep_gemm", lambda: None)
    rows = sort(7, "random", 128)
    x, scale = quantize_inputs(make_rows(len(rows.tokens), 128, DEVICE), "fp8_row")
    weights = make_weights(EXPERTS, 128, 128, "fp8_row", DEVICE)
    with pytest.raises(RuntimeError, match="deep_gemm is not installed"):
        expert_linear(x, scale, weights.down, weights.down_scale, rows, library)
    monkeypatch.setattr(libraries, "deep_gemm", lambda: SimpleNamespace())
    with pytest.raises(ValueError, match="block scales or none"):
        expert_linear(x, scale, weights.down, weights.down_scale, rows, library)
    assert DEVICE != "cpu" or not libraries.deep_gemm_takes(None, weights.down)


def test_kernels_compile_for_hopper() -> None:
    from loka_serve.kernels.moe import triton_rows
    from loka_serve.kernels.moe.sorted_rows import ROWS

    signature = {
        **dict.fromkeys(("row_token_ptr", "expert_of_block_ptr", "end_ptr", "row_expert_ptr"), "*i32"),
        **dict.fromkeys(("scale_ptr", "out_scale_ptr"), "*fp32"),
        **{f"{name}_{axis}_stride": "i32" for name in ("scale", "out_scale") for axis in ("row", "block")},
        "gate_up_ptr": "*bf16",
        "blocks": "i32",
    }
    sizes = {"WIDTH": 1408, "BLOCKS": 16, "BLOCK_M": 128, "ROWS": ROWS}
    forms = [(0, "*bf16"), (1, "*fp8e4nv"), (2, "*fp8e4nv")]
    rows = [{**sizes, "SCALES": scales, "x_ptr": form, "out_ptr": form} for scales, form in forms]
    compile_for_hopper(triton_rows.gather_kernel, signature, rows)
    compile_for_hopper(triton_rows.sorted_swiglu_kernel, signature, [rows[0], rows[2]])
    compile_for_hopper(triton_rows.group_ends_kernel, signature, [{"BLOCK_M": 128, "STEP": 256}])
    compile_for_hopper(triton_rows.row_experts_kernel, signature, [{"BLOCK_M": 128}])
