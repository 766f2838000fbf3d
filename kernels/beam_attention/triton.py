"""Flash-style attention of beams over the shared context of their request, in BF16 or on E4M3 codes."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import cuda
from .configurations import Configuration, WarpSpecialized, choose, choose_fp8
from .reference import LEAST_FP8_WIDTH, Fp8Context
from .triton_schedule import group_offset, load_request, merge_kernel, row_offsets, share_of_program
from .triton_tile import attend, quantize_rows

MERGE_ROWS = 16


@triton.jit
def beam_attention_kernel(
    query_ptr,
    keys,  # descriptors: keys [batch, groups, slots, WIDTH]; values alike, or in FP8 [batch, groups, WIDTH, slots]
    values,
    key_scale_ptr,
    value_scale_ptr,
    lengths_ptr,
    counts_ptr,
    out_ptr,
    part_ptr,  # workspace, see `merge_kernel`
    part_max_ptr,
    part_sum_ptr,
    batch,
    beams,
    scale,
    GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # of the operands: head_dim, in FP8 at least 32
    SHARED_VALUES: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    start, end, _ = share_of_program(
        lengths_ptr, counts_ptr, batch, GROUPS, HEADS_PER_GROUP, BLOCK_M, BLOCK_N, SPLIT, MIN_BLOCKS
    )
    column = tl.arange(0, WIDTH)
    request_start = 0
    for request in tl.range(0, batch, num_stages=1):
        length, rows, blocks, units, request_units = load_request(
            lengths_ptr, counts_ptr, request, GROUPS, HEADS_PER_GROUP, BLOCK_M, BLOCK_N, SPLIT
        )
        # This program's units of this request, counted from the request's first.
        begin = tl.maximum(start - request_start, 0)
        stop = tl.minimum(end - request_start, request_units)
        request_start += request_units
        if begin < stop:
            tiles = tl.cdiv(rows, BLOCK_M)
            for tile in tl.range(begin // units, tl.cdiv(stop, units), num_stages=1):
                group = tile // tiles
                row = tile % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
                at = row_offsets(row, GROUPS, HEADS_PER_GROUP, HEAD_DIM)[:, None] + column[None, :]
                base = group_offset(request, group, beams, GROUPS, HEADS_PER_GROUP, HEAD_DIM)
                inside = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
                query = tl.load(query_ptr + base + at, mask=inside, other=0.0)
                if FP8:
                    query, amax = quantize_rows(query)
                    row_scale = tl.div_rn(amax, 448.0) * (scale * tl.load(key_scale_ptr + request * GROUPS + group))
                else:
                    row_scale = tl.zeros([BLOCK_M], tl.float32) + scale
                if SPLIT:
                    first = tl.maximum(begin - tile * units, 0)
                    last = tl.minimum(stop - tile * units, units)
                else:
                    first = 0
                    last = blocks
                total, row_max, row_sum = attend(
                    query,
                    row_scale,
                    keys,
                    values,
                    request,
                    group,
                    first,
                    last,
                    length,
                    SHARED_VALUES,
                    FP8,
                    BLOCK_M,
                    BLOCK_N,
                    WIDTH,
                    STAGES,
                )
                if last - first == blocks:
                    factor = 1.0 / row_sum
                    if FP8:
                        factor *= tl.load(value_scale_ptr + request * GROUPS + group)
                    tl.store(out_ptr + base + at, (total * factor[:, None]).to(tl.bfloat16), mask=inside)
                else:
                    part = (2 * tl.program_id(0) + (first == 0).to(tl.int32)).to(tl.int64) * BLOCK_M
                    local = tl.arange(0, BLOCK_M)
                    tl.store(part_ptr + part * WIDTH + local[:, None] * WIDTH + column[None, :], total)
                    tl.store(part_max_ptr + part + local, row_max)
                    tl.store(part_sum_ptr + part + local, row_sum)


def beam_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    beam_counts: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    configuration: Configuration | None = None,
) -> Tensor:
    """As `reference.beam_attention`, but rows of dead beams stay as they are in `out` (zero without one).

    Slots from a length up to the next multiple of `SLOT_MULTIPLE` are read and weigh nothing: they must hold finite
    numbers, so call `triton_context.clear_padding` once a context is written. A length must not exceed the slots.

    Args:
        query: contiguous bfloat16 [batch, beams, heads, head_dim], head_dim a power of two from 16 to 128.
        keys, values: bfloat16 [batch, slots, groups, head_dim], head_dim contiguous, other strides multiples of 16
            bytes; the same tensor twice where keys serve as values.
        lengths, beam_counts: int32 [batch]; a request without slots or beams is skipped.
        scale: of the scores; head_dim ** -0.5 by default.
        out: contiguous bfloat16 of query's shape, written in place.
        configuration: how to cut the work up; chosen by shape by default.
    """
    _check(query, keys, values, lengths, beam_counts)
    shared = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    block = _configuration(query, keys.shape[2], keys.shape[1], configuration)

    def describe(tensor: Tensor) -> TensorDescriptor:
        by_group = tensor.transpose(1, 2)
        return TensorDescriptor(
            by_group, list(by_group.shape), list(by_group.stride()), [1, 1, block.block_slots, query.shape[3]]
        )

    described = describe(keys)
    operands = (described, described if shared else describe(values), None, None)
    return _launch(query, operands, (keys.shape[1], keys.shape[2]), lengths, beam_counts, scale, out, block, shared)


def beam_attention_fp8(
    query: Tensor,
    context: Fp8Context,
    lengths: Tensor,
    beam_counts: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    configuration: Configuration | WarpSpecialized | None = None,
) -> Tensor:
    """As `beam_attention` over the codes of `triton_context.quantize_context`, which need no clearing."""
    batch, groups, slots, width = context.keys.shape
    _check(query, context.keys.transpose(1, 2)[..., : query.shape[3]], None, lengths, beam_counts)
    block = configuration
    if block is None and cuda.warp_specialized_takes(query.shape[3], query.device):
        rows = query.shape[1] * query.shape[2] // groups
        block = choose_fp8(rows, batch * groups, slots, _multiprocessors(query.device))
    if isinstance(block, WarpSpecialized):
        out = _output(query, out)
        exponent_scale = query.shape[3] ** -0.5 if scale is None else scale
        cuda.beam_attention_fp8(query, context, lengths, beam_counts, exponent_scale, out, block)
        return out
    block = _configuration(query, groups, slots, block)
    keys, values = (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, *shape])
        for tensor, shape in (
            (context.keys, (block.block_slots, width)),
            (context.values, (width, block.block_slots)),
        )
    )
    operands = (keys, values, context.key_scale, context.value_scale)
    return _launch(query, operands, (slots, groups), lengths, beam_counts, scale, out, block, False)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4  # of Triton's interpreter: few, so that a share of the work spans several tiles


def _configuration(query: Tensor, groups: int, slots: int, configuration: Configuration | None) -> Configuration:
    batch, beams, heads, _ = query.shape
    return configuration or choose(beams * heads // groups, batch * groups, slots, _multiprocessors(query.device))


def _output(query: Tensor, out: Tensor | None) -> Tensor:
    out = torch.zeros_like(query) if out is None else out
    if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous bfloat16 {list(query.shape)}")
    return out


def _launch(
    query: Tensor,
    operands: tuple[TensorDescriptor, TensorDescriptor, Tensor | None, Tensor | None],
    slots_and_groups: tuple[int, int],
    lengths: Tensor,
    beam_counts: Tensor,
    scale: float | None,
    out: Tensor | None,
    block: Configuration,
    shared_values: bool,
) -> Tensor:
    batch, beams, heads, head_dim = query.shape
    slots, groups = slots_and_groups
    fp8 = operands[2] is not None
    out = _output(query, out)
    width = max(head_dim, LEAST_FP8_WIDTH) if fp8 else head_dim
    tiles = batch * groups * triton.cdiv(beams * heads // groups, block.block_rows)
    programs = tiles
    split = block.programs_per_sm > 0
    if split:
        most = tiles * triton.cdiv(triton.cdiv(slots, block.block_slots), block.least_blocks)
        programs = min(block.programs_per_sm * _multiprocessors(query.device), most)
    if not programs:
        return out
    parts = [2 * programs * block.block_rows] if split else [0]
    workspace = [torch.empty(*shape, device=query.device) for shape in ([*parts, width], parts, parts)]
    shape = {"GROUPS": groups, "HEADS_PER_GROUP": heads // groups, "HEAD_DIM": head_dim, "WIDTH": width, "FP8": fp8}
    blocks = {"MIN_BLOCKS": block.least_blocks, "BLOCK_M": block.block_rows, "BLOCK_N": block.block_slots}
    beam_attention_kernel[(programs,)](
        query,
        *operands,
        lengths,
        beam_counts,
        out,
        *workspace,
        batch,
        beams,
        (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
        **shape,
        **blocks,
        SHARED_VALUES=shared_values,
        SPLIT=split,
        STAGES=block.stages,
        num_warps=block.warps,
    )
    if split:
        merge_kernel[(programs, triton.cdiv(block.block_rows, MERGE_ROWS))](
            operands[3], lengths, beam_counts, out, *workspace, batch, beams, **shape, **blocks, MERGE_ROWS=MERGE_ROWS
        )
    return out


def _check(query: Tensor, keys: Tensor, values: Tensor | None, lengths: Tensor, beam_counts: Tensor) -> None:
    batch, _, heads, head_dim = query.shape
    if query.dtype != torch.bfloat16 or not query.is_contiguous() or head_dim not in (16, 32, 64, 128):
        raise ValueError(
            "query: expected contiguous bfloat16 [batch, beams, heads, 16 | 32 | 64 | 128], "
            f"got {query.dtype} {list(query.shape)} with strides {query.stride()}"
        )
    for name, tensor in (("keys", keys), ("values", keys if values is None else values)):
        if tensor.shape != keys.shape or tensor.shape[0] != batch or tensor.shape[3] != head_dim:
            raise ValueError(f"{name}: expected [{batch}, slots, groups, {head_dim}], got {list(tensor.shape)}")
        size = tensor.element_size()
        if tensor.stride(3) != 1 or tensor.data_ptr() % 16 or any(step * size % 16 for step in tensor.stride()[:3]):
            raise ValueError(f"{name}: expected rows of head_dim at multiples of 16 bytes, got {tensor.stride()}")
        if values is not None and tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name}: expected bfloat16, got {tensor.dtype}")
    if heads % keys.shape[2]:
        raise ValueError(f"keys: expected a number of groups that divides {heads} heads, got {keys.shape[2]}")
    for name, tensor in (("lengths", lengths), ("beam_counts", beam_counts)):
        if tensor.dtype != torch.int32 or tensor.shape != (batch,) or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected int32 [{batch}], got {tensor.dtype} {list(tensor.shape)}")
