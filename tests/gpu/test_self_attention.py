"""Self-attention of beams at the 4B-A0.5B preset on the GPU: both outputs, given tensors, a graph without memsets."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from loka_serve.kernels.quantize.reference import quantize_row_blocks_e4m3, quantize_rows_e4m3
from loka_serve.kernels.self_attention import reference
from loka_serve.kernels.self_attention.triton import extend_ancestors, self_attention, self_attention_quantize
from tests.kernels.devices import assert_codes_close

HEADS, HEAD_DIM, LEVELS = 11, 128, 3


def inputs(batch: int, beams: int, level: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(beams)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator).bfloat16()

    keys, values = (normal(LEVELS - 1, batch, beams, HEADS, HEAD_DIM) for _ in range(2))
    ancestors = torch.zeros(batch, beams, level, dtype=torch.int32, device="cuda")
    ancestors.random_(0, beams, generator=generator)
    counts = torch.linspace(1, beams, batch, device="cuda").int()
    return normal(batch, beams, 3, HEADS, HEAD_DIM), keys, values, ancestors, counts


@pytest.mark.parametrize(("batch", "beams"), [(1, 1), (3, 77), (8, 512)])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_equals_reference(batch: int, beams: int, level: int) -> None:
    qkv, keys, values, ancestors, counts = inputs(batch, beams, level)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected = reference.self_attention(qkv, expected_keys, expected_values, ancestors, counts, level)
    found = self_attention(qkv, keys, values, ancestors, counts, level)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
    live = (torch.arange(beams, device="cuda") < counts[:, None]).flatten()
    for block_scales, quantize in ((False, quantize_rows_e4m3), (True, quantize_row_blocks_e4m3)):
        codes, scale = self_attention_quantize(qkv, keys, values, ancestors, counts, level, block_scales)
        expected_codes, expected_scale = quantize(found.flatten(0, 1).flatten(1))
        assert_codes_close(codes.float()[live], expected_codes.float()[live])
        torch.testing.assert_close(scale[live], expected_scale[live], rtol=2**-7, atol=0)
        assert (codes.float()[~live] == 0).all() and (scale[~live] == 0).all()


def test_extended_ancestors() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    previous = torch.zeros(8, 512, 2, dtype=torch.int32, device="cuda").random_(0, 512, generator=generator)
    parents = torch.zeros(8, 300, dtype=torch.int32, device="cuda").random_(0, 512, generator=generator)
    assert torch.equal(extend_ancestors(previous, parents), reference.extend_ancestors(previous, parents))


def test_given_tensors_are_written_by_the_kernel_alone() -> None:
    qkv, keys, values, ancestors, counts = inputs(3, 77, 1)
    out = torch.empty(3 * 77, HEADS * HEAD_DIM, dtype=torch.float8_e4m3fn, device="cuda")
    arguments = (qkv, keys, values, ancestors, counts, 1, True)
    self_attention_quantize(*arguments, out=out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        self_attention_quantize(*arguments, out=out)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert not [name for name in names if "memset" in name.lower() or "fill" in name.lower()], names
