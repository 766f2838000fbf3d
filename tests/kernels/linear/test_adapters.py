"""The libraries behind one interface: what is here, what is not and why, and how each is called."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from loka_serve.kernels.linear import presence, reference
from loka_serve.kernels.linear.adapters import ADAPTERS, Problem, adapter_of, flashinfer, library_of, presences
from loka_serve.kernels.linear.implementations import IMPLEMENTATIONS, implementations_for, linear
from loka_serve.kernels.linear.workload import ERROR_LIMITS, largest_row_error, make_operands

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def forget() -> Any:
    """What was found in one test is looked for again in the next."""
    presence.find_library.cache_clear()
    flashinfer._is_built.cache_clear()
    yield
    presence.find_library.cache_clear()
    flashinfer._is_built.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """A module that imports, with its packages."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def problem(recipe: str, **changes: Any) -> Problem:
    fields = {"recipe": recipe, "rows": 64, "n": 1408, "k": 1408, "out_dtype": torch.bfloat16, "capability": HOPPER}
    return Problem(**{**fields, **changes})


def takers(asked: Problem) -> set[str]:
    return {adapter.library for adapter in ADAPTERS for name in adapter.implementations if adapter.takes(name, asked)}


def test_every_implementation_has_one_library() -> None:
    names = [name for adapter in ADAPTERS for name in adapter.implementations]
    assert len(names) == len(set(names)) and ("reference", *names) == IMPLEMENTATIONS
    assert library_of("torch_fast") == "cublaslt" and library_of("triton_64x64") == "triton"
    assert adapter_of("reference") is None and library_of("reference") == "reference"


def test_the_absent_have_a_reason_and_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("deep_gemm", "fbgemm_gpu", "torchao", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    found = {it.library: it for it in presences()}
    for library, module in (("fbgemm", "fbgemm_gpu"), ("torchao", "torchao"), ("flashinfer", "flashinfer")):
        assert found[library].version is None and module in found[library].reason
        assert str(found[library]).startswith("absent: ")
    for recipe in ("bf16", "fp8_row", "fp8_block", "fp8_tensor"):
        assert takers(problem(recipe)) <= {"cublaslt", "triton"}
    x, scale, weight, weight_scale = make_operands("fp8_row", 3, 32, 64, "cpu")
    with pytest.raises(RuntimeError, match="fbgemm is not here: .*fbgemm_gpu"):
        linear(x, scale, weight, weight_scale, "fbgemm")


def test_a_broken_installation_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise AssertionError("no CUDA toolkit\nat all")

    monkeypatch.setattr(presence.importlib, "import_module", broken)
    module, found = presence.find_library("deep_gemm", "deep_gemm", ("deep-gemm",))
    assert module is None and found.reason == "no CUDA toolkit"


def test_a_library_without_a_distribution_says_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "some_gemm", __version__="1.2")
    assert presence.find_library("some", "some_gemm", ("no-such-distribution",))[1].version == "1.2"


def test_what_each_library_takes_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "deep_gemm")
    install(monkeypatch, "fbgemm_gpu.experimental.gen_ai")
    install(monkeypatch, "torchao.float8.inference")
    built = SimpleNamespace(is_compiled=True)
    generators = {name: lambda: built for name in flashinfer.GENERATORS.values()}
    install(monkeypatch, "flashinfer.jit.gemm", **generators)
    monkeypatch.setattr("loka_serve.kernels.linear.adapters.cublaslt.cuda_version", lambda: (13, 0))
    triton = {"triton"} if presence.find_library("triton", "triton", ())[0] is not None else set()
    assert takers(problem("bf16")) == {"cublaslt", "deep_gemm", *triton}
    assert takers(problem("fp8_row")) == {"cublaslt", "fbgemm", "torchao", *triton}
    assert takers(problem("fp8_block")) == {"cublaslt", "deep_gemm", "flashinfer", *triton}
    assert takers(problem("fp8_tensor")) == {"cublaslt", "torchao", "flashinfer"}
    assert takers(problem("fp8_block", out_dtype=torch.float32)) == {"cublaslt", *triton}
    assert takers(problem("fp8_block", rows=7)) == {"deep_gemm", "flashinfer", *triton}  # scales of x are not in place
    assert takers(problem("fp8_row", k=1400)) == triton
    assert takers(problem("fp8_row", capability=(8, 0))) == set()


def test_flashinfer_that_would_compile_for_minutes_is_absent_until_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def specification(name: str) -> Any:
        return SimpleNamespace(is_compiled=name in built, build_and_load=lambda: built.append(name))

    generators = {name: lambda name=name: specification(name) for name in flashinfer.GENERATORS.values()}
    install(monkeypatch, "flashinfer", __version__="0.6")
    install(monkeypatch, "flashinfer.jit.gemm", **generators)
    adapter = flashinfer.FlashInfer()
    assert adapter.presence().version is None and "not built" in adapter.presence().reason
    assert not adapter.takes("flashinfer", problem("fp8_block"))
    adapter.build()
    assert built == list(flashinfer.GENERATORS.values())
    assert adapter.presence().version is not None and adapter.takes("flashinfer", problem("fp8_block"))


def test_flashinfer_reads_scales_by_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def gemm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        given.append(scale)
        return x.new_empty(len(x), len(weight), dtype=torch.bfloat16)

    install(monkeypatch, "flashinfer.gemm", fp8_blockscale_gemm_sm90=gemm)
    x, scale, weight, weight_scale = make_operands("fp8_block", 6, 128, 256, "cpu")
    assert scale is not None
    linear(x, scale, weight, weight_scale, "flashinfer")
    linear(x, scale.contiguous(), weight, weight_scale, "flashinfer")
    assert given[0].data_ptr() == scale.data_ptr()
    for found in given:
        assert found.stride() == (1, 8) and torch.equal(found, scale)


def test_torchao_and_fbgemm_get_what_torch_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[int], list[int], bool]] = []

    def multiply(
        x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:  # fmt: skip
        calls.append((list(scale.shape), list(weight_scale.shape), use_fast_accum))
        return ((x.float() @ weight.float()) * scale * weight_scale).to(out_dtype)

    install(monkeypatch, "torchao.float8.inference", addmm_float8_unwrapped_inference=multiply)
    install(monkeypatch, "fbgemm_gpu.experimental.gen_ai")
    rowwise = SimpleNamespace(
        f8f8bf16_rowwise=lambda x, w, s, t, use_fast_accum: multiply(
            x, s[:, None], w.T, t[None], torch.bfloat16, use_fast_accum
        )
    )
    monkeypatch.setattr(torch.ops, "fbgemm", rowwise, raising=False)
    for recipe, names in (
        ("fp8_row", ("torchao", "torchao_fast", "fbgemm", "fbgemm_fast")),
        ("fp8_tensor", ("torchao",)),
    ):
        operands = make_operands(recipe, 5, 32, 64, "cpu")
        expected = reference.linear(*operands)
        for name in names:
            assert largest_row_error(linear(*operands, name), expected) < ERROR_LIMITS[recipe], name
    assert calls == [([5, 1], [1, 32], fast) for fast in (False, True, False, True)] + [([1, 1], [1, 1], False)]


def test_one_scale_a_tensor_in_the_reference() -> None:
    operands = make_operands("fp8_tensor", 3, 32, 64, "cpu")
    x, scale, weight, weight_scale = operands
    assert scale is not None and weight_scale is not None and scale.ndim == weight_scale.ndim == 0
    expected = (x.double() * scale) @ (weight.double() * weight_scale).T
    found = linear(*operands, "reference", torch.float32)
    assert largest_row_error(found, expected.float()) < 2**-20
    assert implementations_for("fp8_tensor", 3, 32, 64, "cpu") == ("reference",)
    with pytest.raises(ValueError, match="scale, weight_scale: expected shapes"):
        linear(x, scale, weight, torch.ones(32), "reference")
