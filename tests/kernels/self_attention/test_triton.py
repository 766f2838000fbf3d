"""The kernels against their references: in Triton's interpreter without a GPU, on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loka_serve.kernels.quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3
from loka_serve.kernels.self_attention import reference
from tests.kernels.devices import DEVICE, assert_codes_close, compile_for_hopper, needs_triton

pytestmark = needs_triton

# float32 sums in another order, rounded to BF16: a value next to a tie may move by one step.
TOLERANCE = {"rtol": 2**-7, "atol": 1e-5}
LEVELS = 5


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def beams_at(level: int, beams: int) -> int:
    return 1 if level == 0 else beams - (level == 1)


@pytest.mark.parametrize(("batch", "beams", "heads", "head_dim"), [(2, 5, 3, 16), (3, 4, 11, 32), (1, 2, 1, 128)])
@pytest.mark.parametrize("levels_kept", [LEVELS, LEVELS - 1])
def test_all_levels(batch: int, beams: int, heads: int, head_dim: int, levels_kept: int) -> None:
    from loka_serve.kernels.self_attention import triton as fused

    generator = torch.Generator().manual_seed(beams)
    nan = torch.full((levels_kept, batch, beams, heads, head_dim), float("nan")).bfloat16().to(DEVICE)
    keys, values, expected_keys, expected_values = (nan.clone() for _ in range(4))
    ancestors: torch.Tensor | None = None
    expected_ancestors: torch.Tensor | None = None
    counts = torch.ones(batch, dtype=torch.int32, device=DEVICE)
    for level in range(LEVELS):
        width = beams_at(level, beams)
        if level:
            # Parents among live beams; what dead beams name is out of bounds.
            parents = torch.randint(0, 1000, (batch, width), generator=generator).int().to(DEVICE) % counts[:, None]
            counts = (torch.arange(batch, device=DEVICE) + width - batch + 1).clamp(min=1).int()
            parents[torch.arange(width, device=DEVICE) >= counts[:, None]] = 10**6
            ancestors = fused.extend_ancestors(ancestors, parents)
            last = beams_at(level - 1, beams) - 1
            expected_ancestors = reference.extend_ancestors(expected_ancestors, parents.clamp(max=last))
            assert torch.equal(ancestors, expected_ancestors)
        qkv = random(batch, width, 3, heads, head_dim, seed=level)
        expected = reference.self_attention(qkv, expected_keys, expected_values, expected_ancestors, counts, level)
        found = fused.self_attention(qkv, keys, values, ancestors, counts, level)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        for cache, expected_cache in ((keys, expected_keys), (values, expected_values)):
            torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)


def test_equals_attention_over_reordered_caches() -> None:
    """The model's own way: copy the caches in the order of the parents, then attend densely."""
    batch, beams, heads, head_dim = 2, 6, 2, 16
    generator = torch.Generator().manual_seed(0)
    counts = torch.full((batch,), beams, dtype=torch.int32)
    caches = [torch.zeros(3, batch, beams, heads, head_dim).bfloat16() for _ in range(2)]
    moved: list[torch.Tensor] = []
    ancestors = None
    rows = torch.arange(batch)[:, None]
    for level in range(3):
        width = 1 if level == 0 else beams
        qkv = torch.randn(batch, width, 3, heads, head_dim, generator=generator).bfloat16()
        if level:
            parents = torch.randint(0, moved[0].shape[1], (batch, beams), generator=generator)
            ancestors = reference.extend_ancestors(ancestors, parents.int())
            moved = [past[rows, parents] for past in moved]
        moved.append(qkv)
        past = torch.stack(moved, dim=2).float()
        query, keys, values = (past[:, :, :, part].transpose(2, 3) for part in range(3))
        expected = F.scaled_dot_product_attention(query[:, :, :, -1:], keys, values)[:, :, :, 0].bfloat16()
        live = counts.clamp(max=width)
        found = reference.self_attention(qkv, caches[0], caches[1], ancestors, live, level)
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(("heads", "head_dim", "block_scales"), [(3, 32, False), (3, 128, False), (3, 128, True)])
def test_quantized_output(heads: int, head_dim: int, block_scales: bool) -> None:
    from loka_serve.kernels.self_attention import triton as fused

    caches = [random(2, 2, 4, heads, head_dim, seed=seed) for seed in range(2)]
    qkv = random(2, 4, 3, heads, head_dim, seed=2)
    ancestors = torch.tensor([0, 1, 3, 2], dtype=torch.int32, device=DEVICE).expand(2, 4)[..., None].contiguous()
    counts = torch.tensor([4, 2], dtype=torch.int32, device=DEVICE)
    attended = fused.self_attention(qkv, caches[0], caches[1], ancestors, counts, 1)
    codes, scale = fused.self_attention_quantize(qkv, caches[0], caches[1], ancestors, counts, 1, block_scales)
    quantize = quantize_row_blocks_e4m3 if block_scales else quantize_rows_e4m3
    expected_codes, expected_scale = quantize(attended.flatten(0, 1).flatten(1))
    live = (torch.arange(4, device=DEVICE) < counts[:, None]).flatten()
    torch.testing.assert_close(scale[live], expected_scale[live], rtol=1e-6, atol=0)
    assert_codes_close(codes[live], expected_codes[live])
    assert (codes[~live].float() == 0).all() and (scale[~live] == 0).all()
    # Into given tensors, where dead rows stay as they are.
    out = torch.full(codes.shape, 3.0).to(codes.dtype).to(DEVICE)
    out_scale = torch.full_like(scale, 7.0)
    arguments = (qkv, caches[0], caches[1], ancestors, counts, 1, block_scales)
    found = fused.self_attention_quantize(*arguments, out=out, out_scale=out_scale)
    assert found[0] is out and found[1] is out_scale
    assert torch.equal(out.float()[live], codes.float()[live]) and torch.equal(out_scale[live], scale[live])
    assert (out.float()[~live] == 3).all() and (out_scale[~live] == 7).all()
    _, fresh_scale = fused.self_attention_quantize(*arguments, out=out)
    assert torch.equal(fresh_scale[live], scale[live])
    with pytest.raises(ValueError, match="out: expected contiguous E4M3"):
        fused.self_attention_quantize(*arguments, out=out.float())
    with pytest.raises(ValueError, match="out_scale: expected float32"):
        fused.self_attention_quantize(*arguments, out=out, out_scale=out_scale[:3])
    with pytest.raises(ValueError, match="out_scale: expected beside out"):
        fused.self_attention_quantize(*arguments, out_scale=out_scale)
    if head_dim != 128:
        with pytest.raises(ValueError, match="block_scales"):
            fused.self_attention_quantize(qkv, caches[0], caches[1], ancestors, counts, 1, True)


def test_wrong_arguments_are_named() -> None:
    from loka_serve.kernels.self_attention import triton as fused

    qkv, cache = torch.zeros(1, 2, 3, 2, 16).bfloat16(), torch.zeros(2, 1, 2, 2, 16).bfloat16()
    counts = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="qkv"):
        fused.self_attention(qkv.float(), cache, cache, None, counts, 0)
    with pytest.raises(ValueError, match="ancestors"):
        fused.self_attention(qkv, cache, cache, None, counts, 1)
    with pytest.raises(ValueError, match="at least 3 levels"):
        fused.self_attention(qkv, cache, cache, torch.zeros(1, 2, 3, dtype=torch.int32), counts, 3)
    with pytest.raises(ValueError, match="value_cache"):
        fused.self_attention(qkv, cache, cache.float(), None, counts, 0)
    with pytest.raises(ValueError, match="beam_counts"):
        fused.self_attention(qkv, cache, cache, None, counts.long(), 0)
    with pytest.raises(ValueError, match="parents"):
        fused.extend_ancestors(None, torch.zeros(1, 2, dtype=torch.int64))


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.self_attention.triton import extend_ancestors_kernel, self_attention_kernel

    pointers = dict.fromkeys(("qkv_ptr", "key_cache_ptr", "value_cache_ptr", "out_ptr"), "*bf16")
    pointers |= {"ancestors_ptr": "*i32", "counts_ptr": "*i32", "out_scale_ptr": "*fp32", "scale": "fp32"}
    numbers = ("scale_row", "scale_block", "cache_level", "cache_request", "ancestor_request", "ancestor_beam")
    compile_for_hopper(
        self_attention_kernel,
        signature={**pointers, **dict.fromkeys((f"{name}_stride" for name in numbers), "i32"), "beams": "i32"},
        configurations=[
            {"LEVEL": level, "STORE": level < 2, "HEADS": heads, "HEAD_DIM": 128, "HEADS_PADDED": 16}
            | {"SCALES": scales, "out_ptr": out}
            for heads in (11, 14)
            for level in (0, 2)
            for scales, out in ((0, "*bf16"), (1, "*fp8e4nv"), (2, "*fp8e4nv"))
        ],
    )
    compile_for_hopper(
        extend_ancestors_kernel,
        signature=dict.fromkeys(("previous_ptr", "parents_ptr", "out_ptr"), "*i32")
        | dict.fromkeys(("previous_beams", "beams", "total"), "i32"),
        configurations=[{"LEVEL": level, "BLOCK": 256} for level in (0, 1, 3)],
    )
