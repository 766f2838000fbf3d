"""What is done to a context once, before beams attend to it: clearing its padding, or rounding it to E4M3."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import LEAST_FP8_WIDTH, SLOT_MULTIPLE, Fp8Context

BLOCK = 64
AMAX_PROGRAMS = 16  # of a request and group


@triton.jit
def clear_padding_kernel(
    context_ptr,
    lengths_ptr,
    slots,
    batch_stride,
    slot_stride,
    group_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    request = tl.program_id(0)
    length = tl.load(lengths_ptr + request)
    end = tl.minimum(tl.cdiv(length, MULTIPLE) * MULTIPLE, slots)
    base = context_ptr + request.to(tl.int64) * batch_stride + tl.program_id(1) * group_stride
    column = tl.arange(0, HEAD_DIM)
    for start in range(length, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        zeros = tl.zeros([BLOCK_N, HEAD_DIM], tl.bfloat16)
        tl.store(base + slot[:, None] * slot_stride + column[None, :], zeros, mask=(slot < end)[:, None])


def clear_padding(context: Tensor, lengths: Tensor) -> None:
    """Set to zero, in place, the slots from each length up to the next multiple of `SLOT_MULTIPLE`.

    Args:
        context: bfloat16 [batch, slots, groups, head_dim], any strides with head_dim contiguous.
        lengths: int32 [batch].
    """
    batch, slots, groups, head_dim = context.shape
    if batch:
        clear_padding_kernel[(batch, groups)](
            context,
            lengths,
            slots,
            context.stride(0),
            context.stride(1),
            context.stride(2),
            HEAD_DIM=head_dim,
            BLOCK_N=32,
            MULTIPLE=SLOT_MULTIPLE,
        )


@triton.jit
def load_slots(
    ptr,
    slot,
    length,
    batch_stride,
    slot_stride,
    group_stride,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Float32 [slots, WIDTH] of request and group program_id(0), zeros beyond length and head_dim."""
    request = (tl.program_id(0) // GROUPS).to(tl.int64)
    base = ptr + request * batch_stride + tl.program_id(0) % GROUPS * group_stride
    column = tl.arange(0, WIDTH)
    inside = (slot < length)[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(base + slot[:, None] * slot_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def amax_kernel(
    context_ptr,
    lengths_ptr,
    amax_ptr,  # int32 [batch, groups], bits of float32, zeroed
    batch_stride,
    slot_stride,
    group_stride,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    length = tl.load(lengths_ptr + tl.program_id(0) // GROUPS)
    top = tl.zeros([BLOCK_N], tl.int32)
    for start in range(tl.program_id(1) * BLOCK_N, length, tl.num_programs(1) * BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        values = load_slots(
            context_ptr, slot, length, batch_stride, slot_stride, group_stride, GROUPS, HEAD_DIM, HEAD_DIM
        )
        # Bits of magnitudes order as the magnitudes do, with NaN above infinity.
        top = tl.maximum(top, tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1))
    tl.atomic_max(amax_ptr + tl.program_id(0), tl.max(top, axis=0), sem="relaxed")


@triton.jit
def code_slots(values, amax_ptr, scale_ptr):
    """E4M3 codes under the scale of program_id(0), which the first program of a request and group stores."""
    amax = tl.load(amax_ptr + tl.program_id(0)).to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + tl.program_id(0), tl.div_rn(amax, 448.0))
    codes = values * tl.div_rn(448.0, amax)
    return tl.clamp(codes, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize_context_kernel(
    keys_ptr,
    values_ptr,
    lengths_ptr,
    key_amax_ptr,
    value_amax_ptr,
    key_codes_ptr,
    value_codes_ptr,
    key_scale_ptr,
    value_scale_ptr,
    key_batch_stride,
    key_slot_stride,
    key_group_stride,
    value_batch_stride,
    value_slot_stride,
    value_group_stride,
    padded_slots,
    SHARED_VALUES: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    length = tl.load(lengths_ptr + tl.program_id(0) // GROUPS)
    local = tl.arange(0, BLOCK_N)
    column = tl.arange(0, WIDTH)
    start = tl.program_id(1) * BLOCK_N
    base = tl.program_id(0).to(tl.int64) * padded_slots * WIDTH
    rows = load_slots(
        keys_ptr, start + local, length, key_batch_stride, key_slot_stride, key_group_stride, GROUPS, HEAD_DIM, WIDTH
    )
    codes = code_slots(rows, key_amax_ptr, key_scale_ptr)
    tl.store(key_codes_ptr + base + (start + local)[:, None] * WIDTH + column[None, :], codes)
    if not SHARED_VALUES:
        rows = load_slots(
            values_ptr,
            start + local,
            length,
            value_batch_stride,
            value_slot_stride,
            value_group_stride,
            GROUPS,
            HEAD_DIM,
            WIDTH,
        )
        codes = code_slots(rows, value_amax_ptr, value_scale_ptr)
    # `reference.interleave`, then transposed.
    codes = codes.reshape(BLOCK_N // 16, 2, 4, 2, WIDTH).permute(0, 2, 1, 3, 4).reshape(BLOCK_N, WIDTH).T
    tl.store(value_codes_ptr + base + column[:, None] * padded_slots + (start + local)[None, :], codes)


def quantize_context(keys: Tensor, values: Tensor, lengths: Tensor) -> Fp8Context:
    """As `reference.quantize_context`; head_dim contiguous, other strides free."""
    batch, slots, groups, head_dim = keys.shape
    shared = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    width, padded = max(head_dim, LEAST_FP8_WIDTH), triton.cdiv(slots, SLOT_MULTIPLE) * SLOT_MULTIPLE
    amax = torch.zeros(2, batch, groups, dtype=torch.int32, device=keys.device)
    scale = torch.empty(2, batch, groups, device=keys.device)
    key_codes = torch.empty(batch, groups, padded, width, dtype=torch.float8_e4m3fn, device=keys.device)
    value_codes = torch.empty(batch, groups, width, padded, dtype=torch.float8_e4m3fn, device=keys.device)
    if batch and slots:
        for tensor, top in ((keys, amax[0]), (values, amax[1]))[: 1 if shared else 2]:
            amax_kernel[(batch * groups, AMAX_PROGRAMS)](
                tensor,
                lengths,
                top,
                *tensor.stride()[:3],
                GROUPS=groups,
                HEAD_DIM=head_dim,
                BLOCK_N=BLOCK,
            )
        quantize_context_kernel[(batch * groups, padded // BLOCK)](
            keys,
            values,
            lengths,
            amax[0],
            amax[1],
            key_codes,
            value_codes,
            scale[0],
            scale[1],
            *keys.stride()[:3],
            *values.stride()[:3],
            padded,
            SHARED_VALUES=shared,
            GROUPS=groups,
            HEAD_DIM=head_dim,
            WIDTH=width,
            BLOCK_N=BLOCK,
        )
    return Fp8Context(key_codes, value_codes, scale[0], scale[0 if shared else 1])
