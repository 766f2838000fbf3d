"""The dispatch table without a GPU: choosing, saving, loading, and what a mismatch does."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

from loka_serve.kernels import dispatch as module
from loka_serve.kernels.dispatch import Dispatch, Entry, Environment, Shape
from loka_serve.kernels.dispatch_rule import Candidate
from loka_serve.kernels.linear.workload import Timing

HERE = Environment("NVIDIA H200", "580.1", "13.0", "2.11.0", "3.6.0", None)
TABLE = {
    Shape("linear", "fp8_block", 1408, 1408, 8): Entry({"triton_16x16": 2.0, "torch": 5.0}, 3.5),
    Shape("linear", "fp8_block", 1408, 1408, 512): Entry({"torch": 6.0, "deep_gemm": 6.5, "triton_64x64": 8.0}, 9.5),
    Shape("linear_float32", "bf16", 8192, 1408, 512): Entry({"torch": 22.0}, None),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU were here: its environment, and which of the libraries take a shape."""
    monkeypatch.setattr(Environment, "current", classmethod(lambda cls, device: HERE))

    def usable(recipe: str, rows: int, *rest: object) -> tuple[str, ...]:
        return ("torch", "deep_gemm") if recipe != "fp8_block" or rows % 4 == 0 else ("deep_gemm",)

    monkeypatch.setattr(module, "implementations_for", usable)
    monkeypatch.setattr(module, "default_implementation", lambda *shape: usable(*shape)[0])


def table(**changes: object) -> Dispatch:
    return Dispatch(torch.device("cuda"), dataclasses.replace(HERE, **changes), TABLE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, "triton_16x16"), (8, "triton_16x16"), (12, "torch"), (512, "torch"), (4096, "torch"), (510, "deep_gemm")],
)
def test_the_smallest_bucket_that_holds_the_rows_decides(on_hopper: None, rows: int, expected: str) -> None:
    assert table().choose("linear", "fp8_block", 1408, 1408, rows) == expected


def test_what_was_not_measured_has_a_default(on_hopper: None) -> None:
    assert table().choose("linear", "fp8_row", 1408, 1408, 8) == "torch"
    assert table().choose("linear_float32", "fp8_block", 1408, 1408, 7) == "deep_gemm"
    assert table().entry("linear", "fp8_row", 1408, 1408, 8) is None
    with pytest.raises(ValueError, match="op: expected one of"):
        table().choose("attention", "bf16", 1, 1, 1)


def test_save_and_load(on_hopper: None, tmp_path: Path) -> None:
    path = tmp_path / "dispatch.json"
    table().save(path)
    loaded = Dispatch.load(path, "cuda")
    assert loaded == table() and loaded.reason == ""
    assert list(loaded.entries[min(TABLE)].us) == ["triton_16x16", "torch"]  # the order is the choice
    assert loaded.covers(TABLE) and not loaded.covers([Shape("linear", "bf16", 1, 1, 1)])
    assert [file.name for file in tmp_path.iterdir()] == ["dispatch.json"]


def test_another_environment_is_a_warning_and_a_reason(
    on_hopper: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "dispatch.json"
    table(driver="570.2", deep_gemm="sgl-deep-gemm 0.1").save(path)
    with caplog.at_level(logging.WARNING):
        loaded = Dispatch.load(path, "cuda")
    assert not loaded.entries and "driver 580.1 here but 570.2 there" in loaded.reason
    assert "deep_gemm None here but sgl-deep-gemm 0.1 there" in loaded.reason
    assert loaded.reason in caplog.text
    assert loaded.choose("linear", "fp8_block", 1408, 1408, 8) == "torch"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"environment": {}, "entries": []}', '{"entries": 3'])
def test_no_table_is_a_reason_too(on_hopper: None, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "dispatch.json"
    if content is not None:
        path.write_text(content)
    loaded = Dispatch.load(path, "cuda")
    assert not loaded.entries and "is no dispatch table" in loaded.reason


def test_an_entry_of_another_form_is_a_reason(on_hopper: None, tmp_path: Path) -> None:
    path = tmp_path / "dispatch.json"
    table().save(path)
    saved = json.loads(path.read_text())
    saved["entries"][0]["shape"]["batch"] = 3
    path.write_text(json.dumps(saved))
    assert "is no dispatch table" in Dispatch.load(path, "cuda").reason


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("shape", "op"), "attention", "shape.op: expected one of linear, linear_float32, experts, got 'attention'"),
        (("shape", "recipe"), ["bf16"], "shape.recipe: expected one of bf16"),
        (("shape", "rows"), "8", "shape.rows: expected a whole number from 1, got '8'"),
        (("shape", "rows"), 8.0, "shape.rows: expected a whole number from 1, got 8.0"),
        (("shape", "n"), True, "shape.n: expected a whole number from 1, got True"),
        (("shape", "k"), 0, "shape.k: expected a whole number from 1, got 0"),
        (("us",), {}, "us: expected microseconds by implementation, got {}"),
        (("us",), [["torch", 1.0]], "us: expected microseconds by implementation"),
        (("us",), {"triton_999x1": 1.0}, "us: expected one of reference, torch, torch_fast, deep_gemm, fbgemm"),
        (("us",), {"torch": float("nan")}, "us.torch: expected microseconds above 0, got nan"),
        (("us",), {"torch": float("inf")}, "us.torch: expected microseconds above 0, got inf"),
        (("us",), {"torch": 0.0}, "us.torch: expected microseconds above 0, got 0.0"),
        (("us",), {"torch": "2.0"}, "us.torch: expected microseconds above 0, got '2.0'"),
        (("us",), {"torch": True}, "us.torch: expected microseconds above 0, got True"),
        (("bf16_us",), -1.0, "bf16_us: expected microseconds above 0, got -1.0"),
        (("bf16_us",), "3.5", "bf16_us: expected microseconds above 0, got '3.5'"),
        (("shape", "groups"), 0, "shape.groups: expected a whole number from 1, got 0"),
        (("shape", "shared"), -1, "shape.shared: expected a whole number from 0, got -1"),
        (("mere",), [], "mere: expected errors by implementation of us, got []"),
        (("mere",), {"cutlass": 0.1}, "mere: expected errors by implementation of us, got {'cutlass': 0.1}"),
        (("mere",), {"torch": float("nan")}, "mere.torch: expected an error from 0, got nan"),
    ],
)
def test_a_damaged_entry_is_a_reason_that_names_it(
    on_hopper: None, tmp_path: Path, place: tuple[str, ...], value: object, message: str
) -> None:
    path = tmp_path / "dispatch.json"
    table().save(path)
    saved = json.loads(path.read_text())
    entry = saved["entries"][1]
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    path.write_text(json.dumps(saved))
    loaded = Dispatch.load(path, "cuda")
    assert not loaded.entries and f"is no dispatch table: ValueError: entries[1].{message}" in loaded.reason
    assert loaded.choose("linear", "fp8_block", 1408, 1408, 8) == "torch"


@pytest.mark.parametrize("entries", [{}, 3, "x", [[]], [{}], [None]])
def test_entries_of_another_form_are_a_reason(on_hopper: None, tmp_path: Path, entries: object) -> None:
    path = tmp_path / "dispatch.json"
    path.write_text(json.dumps({"environment": dataclasses.asdict(HERE), "entries": entries}))
    assert "is no dispatch table" in Dispatch.load(path, "cuda").reason


def test_only_a_tiling_that_exists_is_chosen(on_hopper: None) -> None:
    shape = Shape("linear", "fp8_block", 1408, 1408, 8)
    for name, expected in (("triton_16x16", "triton_16x16"), ("triton_999x1", "torch"), ("reference", "torch")):
        dispatch = Dispatch(torch.device("cuda"), HERE, {shape: Entry({name: 1.0}, None)})
        assert dispatch.choose(shape.op, shape.recipe, shape.n, shape.k, shape.rows) == expected


def test_measuring_keeps_what_is_right_and_the_bf16_twin(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured = []

    def ranked(names: tuple[str, ...], recipe: str, rows: int, *rest: object) -> list[Timing]:
        measured.append((recipe, rows))
        if rows == 3:
            return []
        slow = 2.0 if recipe == "bf16" else 1.0
        return [Timing("deep_gemm", 8.0 * slow, 0.001, 0.08), Timing("torch", 9.0 * slow, 0.001)]

    monkeypatch.setattr(module, "rank_implementations", ranked)
    shapes = [Shape("linear", recipe, 128, 128, rows) for recipe in ("fp8_row", "bf16") for rows in (4, 3)]
    done: list[int] = []
    found = Dispatch.measure(shapes, "cuda", done.append)
    assert found.entries == {
        Shape("linear", "bf16", 128, 128, 4): Entry({"deep_gemm": 16.0, "torch": 18.0}, 16.0, {"deep_gemm": 0.08}),
        Shape("linear", "fp8_row", 128, 128, 4): Entry({"deep_gemm": 8.0, "torch": 9.0}, 16.0, {"deep_gemm": 0.08}),
    }
    assert sum(done) == len(shapes)
    assert found.cells() == {
        ("linear", 128, 128, 1, 4): [
            Candidate("deep_gemm", "deep_gemm", "fp8_row", 8.0, 0.08),
            Candidate("torch", "cublaslt", "fp8_row", 9.0, None),
            Candidate("deep_gemm", "deep_gemm", "bf16", 16.0, 0.08),
            Candidate("torch", "cublaslt", "bf16", 18.0, None),
        ]
    }
    assert found.choose("linear", "fp8_row", 128, 128, 4) == "deep_gemm"
    assert len(measured) == 4  # a twin that is asked for itself is timed once
    assert "nothing computes" in caplog.text


def test_without_a_gpu_the_reference_runs() -> None:
    unmeasured = Dispatch.unmeasured("cpu")
    assert unmeasured.reason == "not measured"
    assert unmeasured.choose("linear", "fp8_row", 1408, 1408, 8) == "reference"
    with pytest.raises(ValueError, match="measured on a CUDA device"):
        Dispatch.measure([], "cpu")


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 5000])
def test_a_file_beyond_reading_gives_defaults_with_a_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "dispatch.json").write_text(text)
    loaded = Dispatch.load(tmp_path / "dispatch.json", "cpu")
    assert not loaded.entries and "is no dispatch table" in loaded.reason


def test_measuring_stops_between_shapes(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def ranked(names: tuple[str, ...], *rest: object) -> list[Timing]:
        clock[0] += 1.0
        return [Timing("torch", 9.0, 0.001)]

    monkeypatch.setattr(module, "rank_implementations", ranked)
    shapes = [Shape("linear", "bf16", 128, 128, rows) for rows in (4, 8, 16)]
    found = Dispatch.measure(shapes, "cuda", enough=lambda: clock[0] >= 2.0)
    assert list(found.entries) == shapes[:2]


def test_names_of_sites_and_libraries_are_kept_beside_the_table(on_hopper: None, tmp_path: Path) -> None:
    named = dataclasses.replace(
        table(), libraries={"fbgemm": "absent: No module named 'fbgemm_gpu'"}, sites={("linear", 8, 4, 1): "a, b"}
    )
    named.save(tmp_path / "dispatch.json")
    found = Dispatch.read(tmp_path / "dispatch.json")
    assert found.libraries == named.libraries and found.sites == named.sites and found.entries == TABLE
    assert found.environment == HERE


def test_a_table_from_before_errors_and_experts_is_read(on_hopper: None, tmp_path: Path) -> None:
    saved = json.loads(table().text())
    saved = {
        "environment": {name: value for name, value in saved["environment"].items() if value is not None},
        "entries": [
            {"shape": {key: it["shape"][key] for key in ("op", "recipe", "n", "k", "rows")}, "us": it["us"]}
            | {"bf16_us": it["bf16_us"]}
            for it in saved["entries"]
        ],
    }
    saved["environment"]["deep_gemm"] = None
    (tmp_path / "dispatch.json").write_text(json.dumps(saved))
    assert Dispatch.load(tmp_path / "dispatch.json", "cuda").entries == TABLE


def test_experts_run_what_was_measured_for_their_shape() -> None:
    pytest.importorskip("triton")
    from loka_serve.kernels.moe.measure import configurations_of

    names = list(configurations_of("fp8_block"))
    shape = Shape("experts", "fp8_block", 1408, 1408, 512, 54, 4, 1)
    entries = {shape: Entry({"of another version": 1.0, names[1]: 2.0, names[0]: 3.0}, 9.0)}
    dispatch = Dispatch(torch.device("cpu"), HERE, entries)
    chosen = dispatch.choose_experts("fp8_block", 1408, 1408, 54, tokens=300)
    assert chosen is configurations_of("fp8_block")[names[1]]
    assert dispatch.choose_experts("fp8_block", 1408, 1408, 53, 300) is None  # other experts
    assert dispatch.choose_experts("bf16", 1408, 1408, 54, 300) is None


def test_libraries_of_experts_are_read_from_a_configuration_s_name() -> None:
    pytest.importorskip("triton")
    from loka_serve.kernels.moe.configurations import FP8_CONFIGURATIONS
    from loka_serve.kernels.moe.measure import configuration_name

    entries = {
        Shape("experts", "fp8_block", 8, 8, rows, 4): Entry({configuration_name(configuration): 1.0}, None)
        for rows, (_, configuration) in enumerate(FP8_CONFIGURATIONS, start=1)
    }
    cells = Dispatch(torch.device("cpu"), HERE, entries).cells()
    for (_, configuration), candidates in zip(FP8_CONFIGURATIONS, cells.values(), strict=True):
        libraries = candidates[0].library.split("+")
        assert ("cuda" in libraries) == configuration.warp_specialized
        assert ("deep_gemm" in libraries) == (configuration.library is not None)
        assert libraries == ["triton"] or configuration.warp_specialized or configuration.library is not None
