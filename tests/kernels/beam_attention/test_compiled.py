"""Every configuration in use compiles for Hopper to its matrix instructions, without spills where it counts."""

from __future__ import annotations

from typing import Any

import pytest

from loka_serve.kernels.beam_attention import configurations
from loka_serve.kernels.beam_attention.configurations import Configuration
from tests.kernels.beam_attention.compiled import MachineCode, machine_code
from tests.kernels.devices import needs_triton

pytestmark = needs_triton

HEAD_DIM = 128
GROUPS = 11
# A Hopper multiprocessor.
SHARED_MEMORY, SHARED_MEMORY_OF_A_PROGRAM, RESERVED, REGISTERS = 228 << 10, 227 << 10, 1 << 10, 64 << 10
FLOATS = ("key_scale_ptr", "value_scale_ptr", "part_ptr", "part_max_ptr", "part_sum_ptr")


def variant(configuration: Configuration, fp8: bool, shared: bool, heads_per_group: int = 1) -> dict[str, Any]:
    element, slots = ("fp8e4nv" if fp8 else "bf16"), configuration.block_slots
    values = f"{HEAD_DIM}, {slots}" if fp8 else f"{slots}, {HEAD_DIM}"
    return {
        "signature": {
            **dict.fromkeys(("query_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(FLOATS, "*fp32"),
            **dict.fromkeys(("lengths_ptr", "counts_ptr"), "*i32"),
            **dict.fromkeys(("batch", "beams"), "i32"),
            "keys": f"tensordesc<{element}[1, 1, {slots}, {HEAD_DIM}]>",
            "values": f"tensordesc<{element}[1, 1, {values}]>",
            "scale": "fp32",
        },
        "constants": {
            "GROUPS": GROUPS // heads_per_group,
            "HEADS_PER_GROUP": heads_per_group,
            "HEAD_DIM": HEAD_DIM,
            "WIDTH": HEAD_DIM,
            "SHARED_VALUES": shared,
            "FP8": fp8,
            "SPLIT": configuration.programs_per_sm > 0,
            "MIN_BLOCKS": configuration.least_blocks,
            "BLOCK_M": configuration.block_rows,
            "BLOCK_N": configuration.block_slots,
            "STAGES": configuration.stages,
        },
        "options": {"num_warps": configuration.warps},
    }


def assert_fits(code: MachineCode, configuration: Configuration, shared: bool) -> None:
    # Values apart from keys take twice the room: one program at a time is right, only slower.
    programs = max(configuration.programs_per_sm, 1) if shared else 1
    assert code.shared_memory <= SHARED_MEMORY_OF_A_PROGRAM
    assert programs * (code.shared_memory + RESERVED) <= SHARED_MEMORY
    # Registers are given out by 8 a thread.
    assert programs * configuration.warps * 32 * -(-code.registers // 8) * 8 <= REGISTERS


def assert_warpgroup_products(code: MachineCode, fp8: bool) -> None:
    assert code.loop["QGMMA" if fp8 else "HGMMA"] >= 4
    assert code.loop["HMMA"] == 0
    # One arrival and one wait a product: more means that the compiler made its instructions wait for each other.
    assert code.loop["WARPGROUP"] <= 4
    # Probabilities go from the first product to the second in registers; the shuffles are the rows' maxima and sums.
    assert code.loop["STS"] == code.loop["LDS"] == 0
    assert code.loop["SHFL"] <= 8
    # FP8 in the split schedule is at the limit of registers: it reads three numbers back, and is fastest all the same.
    assert code.loop["STL"] == 0 and code.loop["LDL"] <= 4


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_configurations_in_use(fp8: bool) -> None:
    from loka_serve.kernels.beam_attention.triton import beam_attention_kernel

    # The codes of values are laid out otherwise than those of keys, so that they are never shared.
    cases = [(one, shared) for one in configurations.IN_USE for shared in (True, False) if not (fp8 and shared)]
    variants = [variant(configuration, fp8, shared) for configuration, shared in cases]
    for (configuration, shared), code in zip(cases, machine_code(beam_attention_kernel, variants), strict=True):
        print(configuration, "keys are values" if shared else "", code.registers, code.stack, code.shared_memory)
        assert_fits(code, configuration, shared)
        assert code.instructions["UTMALDG"] >= 2
        # Around the loop a few numbers may be kept aside, once a tile.
        assert code.stack <= 160
        if configuration.block_rows >= 64:
            assert_warpgroup_products(code, fp8)
        else:
            assert code.loop["HMMA"] >= 32


def test_grouped_heads_and_the_merge() -> None:
    from loka_serve.kernels.beam_attention.triton import MERGE_ROWS, beam_attention_kernel
    from loka_serve.kernels.beam_attention.triton_schedule import merge_kernel

    chosen = configurations.SPLIT_TILES
    (code,) = machine_code(beam_attention_kernel, [variant(chosen, False, True, heads_per_group=11)])
    assert_fits(code, chosen, True)
    assert_warpgroup_products(code, False)
    main = variant(configurations.SPLIT_TILES, True, True)
    merge = {
        "signature": {name: main["signature"].get(name, "") for name in merge_kernel.arg_names},
        "constants": {name: main["constants"][name] for name in merge_kernel.arg_names if name in main["constants"]}
        | {"MERGE_ROWS": MERGE_ROWS},
        "options": {"num_warps": 4},
    }
    (code,) = machine_code(merge_kernel, [merge])
    assert code.stack == 0 and code.registers <= 128


def test_context_kernels() -> None:
    from loka_serve.kernels.beam_attention import triton_context

    strides = {f"{name}_stride": "i32" for name in ("slot", "group")} | {"batch_stride": "i64"}
    shape = {"HEAD_DIM": HEAD_DIM, "BLOCK_N": triton_context.BLOCK}
    context = {"context_ptr": "*bf16", "lengths_ptr": "*i32", **strides}
    both = {f"{part}_{name}": kind for part in ("key", "value") for name, kind in strides.items()}
    both |= {f"{part}s_ptr": "*bf16" for part in ("key", "value")}
    both |= {f"{part}_amax_ptr": "*i32" for part in ("key", "value")}
    both |= {f"{part}_codes_ptr": "*fp8e4nv" for part in ("key", "value")}
    both |= {f"{part}_scale_ptr": "*fp32" for part in ("key", "value")}
    cases = [
        (
            triton_context.clear_padding_kernel,
            [{"signature": context | {"slots": "i32"}, "constants": shape | {"MULTIPLE": 128}}],
        ),
        (
            triton_context.amax_kernel,
            [{"signature": context | {"amax_ptr": "*i32"}, "constants": shape | {"GROUPS": GROUPS}}],
        ),
        (
            triton_context.quantize_context_kernel,
            [
                {
                    "signature": both | {"lengths_ptr": "*i32", "padded_slots": "i32"},
                    "constants": shape | {"GROUPS": GROUPS, "WIDTH": HEAD_DIM, "SHARED_VALUES": shared},
                }
                for shared in (True, False)
            ],
        ),
    ]
    for kernel, variants in cases:
        for code in machine_code(kernel, [{**one, "options": {"num_warps": 4}} for one in variants]):
            assert code.stack == 0
