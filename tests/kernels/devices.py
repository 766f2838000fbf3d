"""Where kernel tests run: on a GPU if there is one, otherwise in Triton's interpreter; and compilation for Hopper."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel module is imported


def _round_as_hardware_does() -> None:
    """Make the interpreter's float32 downcasts round to nearest even.

    As shipped it truncates to bfloat16, and drops the carry into the exponent when it rounds to E4M3 (31.5 -> 16).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    rounded = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target in rounded:
            dtype, bits = rounded[target]
            return torch.from_numpy(data.copy()).view(torch.float32).to(dtype).view(bits).numpy().reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    interpreter._convert_float = convert_float


def _multiply_bfloat16_numbers() -> None:
    """Make the interpreter's dot widen bfloat16: as shipped it multiplies the integers that hold the bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = torch.from_numpy(handle.data.astype("int16")).view(torch.bfloat16)
        return interpreter.TensorHandle(bits.float().numpy(), tl.float32)

    def dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(builder, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = dot


if DEVICE == "cpu" and importlib.util.find_spec("triton") is not None:
    _round_as_hardware_does()
    _multiply_bfloat16_numbers()

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def compile_for_hopper(
    kernel: Any,
    signature: dict[str, str],
    configurations: list[dict[str, Any]],
    num_warps: int = 4,
    instruction: str = "",
) -> None:
    """Compile a kernel for sm_90 down to a cubin in each configuration (its constexpr arguments), which needs no GPU.

    Entries of a configuration that are no constexpr override the signature, or num_warps and num_stages. The PTX must
    have `instruction`. All runs in a process of its own: a kernel decorated for the interpreter cannot be compiled.
    """
    module, name = kernel.fn.__module__, kernel.fn.__name__
    script = textwrap.dedent(
        f"""
        import importlib, triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        kernel = getattr(importlib.import_module({module!r}), {name!r})
        constexprs = {{parameter.name for parameter in kernel.params if parameter.is_constexpr}}
        for configuration in {configurations!r}:
            constants = {{name: value for name, value in configuration.items() if name in constexprs}}
            types = {signature!r} | configuration | dict.fromkeys(constants, "constexpr")
            source = ASTSource(kernel, {{name: types[name] for name in kernel.arg_names}}, constants)
            options = {{"num_warps": {num_warps}}}
            options.update((name, configuration[name]) for name in ("num_warps", "num_stages") if name in configuration)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert len(compiled.asm["cubin"]) > 1000, configuration
            assert {instruction!r} in compiled.asm["ptx"], configuration
            assert compiled.metadata.shared <= 227 * 1024, configuration
        """
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


def assert_codes_close(codes: torch.Tensor, expected: torch.Tensor) -> None:
    """E4M3 codes may differ by one rounding step where a sum in another order moves a value across a tie."""
    found, wanted = codes.float(), expected.float()
    assert (found != wanted).float().mean() < 0.01
    # One E4M3 step is at most 1/8 of the value; next to zero steps are 2**-9.
    assert ((found - wanted).abs() <= (wanted.abs() / 8).clamp(min=2**-9)).all()
