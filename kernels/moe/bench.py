"""The sparse-MoE block and its parts at the 4B-A0.5B preset, against torch's grouped GEMMs and DeepGEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..benchmarking import KernelRow, make_row, time_us
from ..norm_quantize.triton import residual_norm_quantize
from ..quantize.reference import expand_row_blocks, quantize_row_blocks_e4m3
from ..quantize.triton import ROW_SCALES
from . import baselines, reference
from .block import moe_block
from .combine import combine, combine_norm_quantize
from .configurations import Configuration, choose_configuration
from .cuda import warp_specialized_takes
from .libraries import deep_gemm_takes
from .reference import ExpertWeights, SortedRows
from .routing import route, sort_rows
from .workload import (
    D_MODEL,
    EXPERTS,
    ROUTED,
    SLOTS,
    TOP_K,
    WIDTH,
    Batch,
    make_batches,
    make_weights,
    run_down,
    run_gate_up,
)

TOKENS = (1, 8, 64, 512, 4096, 16384)
CHECKED_TOKENS, CHECKED_BLOCKS = 64, 4  # whose results are compared with the reference

Call = Callable[[Batch], object]


def rows(tokens: Sequence[int] = TOKENS) -> Iterator[KernelRow]:
    """Router, sort, combination, both GEMMs and the whole block in BF16; then the GEMMs and the block in FP8."""
    twins: dict[tuple[str, int], float] = {}
    for fp8 in (False, True):
        weights = make_weights(fp8)
        for count in tokens:
            library = deep_gemm_takes(weights.gate_up_scale, weights.gate_up)
            specialized = warp_specialized_takes(weights.gate_up, weights.gate_up_scale)
            configuration = choose_configuration(count * SLOTS, EXPERTS, fp8, library, specialized)
            batches = make_batches(count, weights, configuration)
            if not fp8:
                yield from _routing_rows(count, batches)
            yield from _gemm_rows(count, batches, weights, configuration, twins)


def _routing_rows(tokens: int, batches: list[tuple[Batch]]) -> Iterator[KernelRow]:
    block_m = batches[0][0].rows.block_m

    def sum_slots(batch: Batch) -> Tensor:
        return combine(batch.outputs, batch.rows.positions, batch.routing.weights, residual=batch.residual)

    def sum_slots_eagerly(batch: Batch) -> Tensor:
        return reference.combine(batch.outputs, batch.rows.positions, batch.routing.weights, residual=batch.residual)

    gain = torch.ones(D_MODEL, device="cuda")

    def norm_in_one_pass(batch: Batch) -> object:
        slots = batch.outputs, batch.rows.positions, batch.routing.weights
        return combine_norm_quantize(*slots, gain, 1e-6, ROW_SCALES, residual=batch.residual)

    def norm_after(batch: Batch) -> object:
        total = combine(batch.outputs, batch.rows.positions, batch.routing.weights)
        return residual_norm_quantize(total, batch.residual, gain, 1e-6, block_scales=False)

    sum_bytes = 2 * D_MODEL * tokens * (SLOTS + 2)
    operations: dict[str, tuple[int, Call, str, Call]] = {
        "moe_router": (
            tokens * (4 * ROUTED + 8 * SLOTS),
            lambda batch: route(batch.logits, batch.bias, TOP_K, 1),
            "torch sigmoid, topk",
            lambda batch: baselines.torch_route(batch.logits, batch.bias),
        ),
        "moe_sort": (
            12 * tokens * SLOTS,
            lambda batch: sort_rows(batch.routing, EXPERTS, block_m),
            "torch argsort",
            lambda batch: baselines.torch_sort(batch.routing.selected, EXPERTS),
        ),
        "moe_combine": (sum_bytes, sum_slots, "torch gather, sum", sum_slots_eagerly),
        "moe_combine_norm": (sum_bytes + tokens * D_MODEL, norm_in_one_pass, "combine, then norm", norm_after),
    }
    error = _relative_error(sum_slots(batches[0][0]), sum_slots_eagerly(batches[0][0]))
    for op, (traffic, call, name, baseline) in operations.items():
        us, baseline_us = time_us(call, batches), time_us(baseline, batches)
        max_error = error if op == "moe_combine" else 0.0
        yield make_row(op, f"{tokens} tokens, {EXPERTS} experts", us, 0, traffic, (name, baseline_us), max_error)


def _gemm_rows(
    tokens: int,
    batches: list[tuple[Batch]],
    weights: ExpertWeights,
    configuration: Configuration,
    twins: dict[tuple[str, int], float],
) -> Iterator[KernelRow]:
    fp8 = weights.down_scale is not None
    used = int(torch.unique(batches[0][0].routing.selected).numel())
    size, inner = weights.down.element_size(), tokens * SLOTS
    flops = 2 * inner * WIDTH * D_MODEL  # of the down projection; gate and up have as many each
    reads = used * WIDTH * D_MODEL * size
    operations: dict[str, tuple[Call, int, int]] = {
        "moe_gate_up": (
            lambda b: run_gate_up(b.x, b.scale, weights, b.rows, configuration.gate_up),
            2 * flops,
            2 * reads + size * (tokens * D_MODEL + inner * WIDTH),
        ),
        "moe_down": (
            lambda b: run_down(b.hidden, b.hidden_scale, weights, b.rows, configuration.down),
            flops,
            reads + inner * (size * WIDTH + 2 * D_MODEL),
        ),
        "moe_block": (lambda b: _block(b, weights), 3 * flops, 3 * reads + tokens * D_MODEL * (size + 4)),
    }
    errors = _errors(batches[0][0], weights)
    shape = f"{tokens} tokens, {EXPERTS} experts, {'fp8_block' if fp8 else 'bf16'}"
    for op, (call, operation_flops, traffic) in operations.items():
        us = time_us(call, batches)
        beside = list(_library_times(op, batches, weights))
        if fp8:
            beside.append(("BF16 twin", twins[op, tokens]))
        else:
            twins[op, tokens] = us
        for baseline in beside:
            yield make_row(op, shape, us, operation_flops, traffic, baseline, errors[op])


def _block(batch: Batch, weights: ExpertWeights) -> Tensor:
    return moe_block(batch.x, batch.scale, batch.logits, batch.bias, weights, TOP_K, residual=batch.residual)


def _library_times(op: str, batches: list[tuple[Batch]], weights: ExpertWeights) -> Iterator[tuple[str, float]]:
    timed = baselines.bf16_baselines if weights.down_scale is None else baselines.fp8_baselines
    for name, call, inputs in timed(op, batches, weights):
        try:
            yield name, time_us(call, inputs)
        except RuntimeError as error:  # a library that does not take this shape or device
            print(f"{name}, {op}: {str(error)[:200]}")


def _errors(batch: Batch, weights: ExpertWeights) -> dict[str, float]:
    """Relative Frobenius errors of the first blocks of each GEMM, and of the first tokens of the block."""
    sorted_rows, blocks = batch.rows, CHECKED_BLOCKS
    height = blocks * sorted_rows.block_m
    some = SortedRows(
        sorted_rows.tokens[:height],
        sorted_rows.expert_of_block[:blocks],
        sorted_rows.block_count,
        sorted_rows.positions,
        sorted_rows.block_m,
    )
    real = (some.expert_of_block >= 0).repeat_interleave(some.block_m)
    real &= some.tokens >= 0
    expected = reference.gate_up_swiglu(batch.x, batch.scale, weights.gate_up, weights.gate_up_scale, some)
    hidden, scale = batch.hidden[:height], None
    values = hidden.float()
    if batch.hidden_scale is not None:
        scale = batch.hidden_scale[:height]
        values = values * expand_row_blocks(scale, WIDTH)
        codes, expected_scale = quantize_row_blocks_e4m3(expected)
        expected = codes.float() * expand_row_blocks(expected_scale, WIDTH)
    outputs = reference.expert_linear(hidden, scale, weights.down, weights.down_scale, some)
    few = slice(0, CHECKED_TOKENS)
    block = reference.moe_block(
        batch.x[few],
        None if batch.scale is None else batch.scale[few],
        batch.logits[few],
        batch.bias,
        weights,
        TOP_K,
        residual=batch.residual[few],
    )
    return {
        "moe_gate_up": _relative_error(values[real], expected[real]),
        "moe_down": _relative_error(batch.outputs[:height][real], outputs[real]),
        "moe_block": _relative_error(_block(batch, weights)[few], block),
    }


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
