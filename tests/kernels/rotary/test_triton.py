"""The rotation against its reference: in Triton's interpreter without a GPU, on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka_serve.kernels.rotary import reference
from tests.kernels.devices import DEVICE, compile_for_hopper, needs_triton

pytestmark = needs_triton

# Sines of another library, and a fused multiply-add: a value next to a tie may move by one step of BF16.
TOLERANCE = {"rtol": 2**-7, "atol": 2**-12}
THETA = 10000.0


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).bfloat16().to(DEVICE)


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (1, 70, 11, 128), (3, 1, 2, 6)])
def test_queries(shape: tuple[int, int, int, int]) -> None:
    from loka_serve.kernels.rotary.triton import rotate_queries

    query = random(*shape)
    positions = torch.tensor([2999, 0, 17][: shape[0]], dtype=torch.int32, device=DEVICE)
    expected = reference.rotate_queries(query, positions, THETA)
    before = query.clone()
    torch.testing.assert_close(rotate_queries(query, positions, THETA), expected, **TOLERANCE)
    assert torch.equal(query, before)
    assert rotate_queries(query, positions, THETA, out=query) is query
    torch.testing.assert_close(query, expected, **TOLERANCE)


@pytest.mark.parametrize("shape", [(2, 6, 3, 16), (1, 90, 2, 64), (3, 1, 1, 6)])
def test_keys_of_any_strides(shape: tuple[int, int, int, int]) -> None:
    from loka_serve.kernels.rotary.triton import rotate_keys

    batch, slots, groups, head_dim = shape
    wide = random(batch, slots, 2 * groups, head_dim)
    keys = wide[:, :, groups:]  # one chunk of a wider projection
    expected = reference.rotate_keys(keys, THETA)
    out = rotate_keys(keys, THETA)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert torch.equal(out[:, :2], keys[:, :2]), "neither the static slot nor position 0 is turned"
    before = wide[:, :, :groups].clone()
    rotate_keys(keys, THETA, out=keys)
    torch.testing.assert_close(keys, expected, **TOLERANCE)
    assert torch.equal(wide[:, :, :groups], before)


def test_empty_and_wrong_inputs() -> None:
    from loka_serve.kernels.rotary.triton import rotate_keys, rotate_queries

    keys = random(2, 3, 1, 8)
    positions = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    assert rotate_keys(keys[:0], THETA).shape == (0, 3, 1, 8)
    for name, call in (
        ("keys", lambda: rotate_keys(keys.float(), THETA)),
        ("keys", lambda: rotate_keys(keys[..., :7], THETA)),
        ("query", lambda: rotate_queries(keys[..., ::2], positions, THETA)),
        ("positions", lambda: rotate_queries(keys, positions.long(), THETA)),
        ("out", lambda: rotate_keys(keys, THETA, out=keys[:1])),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.rotary.triton import rotate_kernel

    strides = [f"{tensor}_{name}_stride" for tensor in ("x", "out") for name in ("batch", "place", "head")]
    compile_for_hopper(
        rotate_kernel,
        signature={"x_ptr": "*bf16", "out_ptr": "*bf16", "positions_ptr": "*i32", "frequencies_ptr": "*fp32"}
        | dict.fromkeys(["places", *strides], "i32"),
        configurations=[
            {"HEADS": heads, "HALF": 64, "HALF_PADDED": 64, "ROWS": 32, "KEYS": keys}
            for heads in (1, 11)
            for keys in (False, True)
        ],
    )
