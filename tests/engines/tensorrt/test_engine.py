"""The stitched executor with segments on the CPU against the reference engine: logits, answers, catalogs, refusals."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.logits import logits_of
from loka_serve.bundle import Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.engines import load_engine
from loka_serve.engines.base import BeamResult, EngineLimits, EngineRequest, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.engines.tensorrt.artifacts import ARTIFACTS_FILE
from loka_serve.engines.tensorrt.engine import TensorRTEngine
from loka_serve.errors import BundleError, EngineError
from tests.building import CONFIG
from tests.engines.tensorrt.bundles import build_bundle, random_batch, rewrite

LIMITS = EngineLimits(8, CONFIG.beam_width, CONFIG.max_context, CONFIG.levels)
# Same recipes, same rounding, other order of summation: a value near the middle between two codes may fall to either,
# which in FP8 is 2^-4 of one input of one row.
LOGIT_TOLERANCE = {"bf16": 1e-3, "fp8_tensor": 1e-2}
CASES = {
    "bf16": ("bf16", CONFIG),
    "fp8_tensor": ("fp8_tensor", CONFIG),
    "fp8_tensor_rotary_block_norm": (
        "fp8_tensor",
        dataclasses.replace(CONFIG, position_encoding="rotary", norm="block", activation="hard_swish"),
    ),
    "fp8_tensor_key_for_every_head": ("fp8_tensor", dataclasses.replace(CONFIG, kv_groups=CONFIG.heads, layers=2)),
    "bf16_biases_two_pathways": ("bf16", dataclasses.replace(CONFIG, linear_bias=True, short_term_length=5)),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build_bundle(tmp_path_factory.mktemp("fp8"), "--engine", "tensorrt", "--recipe", "fp8_tensor")


def engines(bundle: Bundle, runtime: str = "") -> tuple[TensorRTEngine, ReferenceEngine]:
    stitched, reference = (load_engine(bundle, name, "cpu", LIMITS) for name in ("tensorrt", "reference"))
    assert isinstance(stitched, TensorRTEngine) and isinstance(reference, ReferenceEngine)
    return stitched, reference


def check_equal(found: BeamResult, expected: BeamResult, tolerance: float) -> None:
    """Same leaves but for near ties, scores alike."""
    np.testing.assert_array_equal(found.counts, expected.counts)
    assert not found.failed.any()
    for row, count in enumerate(found.counts.tolist()):
        scores = dict(zip(expected.leaves[row, :count].tolist(), expected.scores[row, :count].tolist(), strict=True))
        leaves = found.leaves[row, :count].tolist()
        common = [leaf in scores for leaf in leaves]
        assert sum(common) >= count - max(1, count // 8)  # one at the cut may fall either way
        ours = found.scores[row, :count]
        near = [abs(ours[place] - scores[leaf]) < tolerance for place, leaf in enumerate(leaves) if leaf in scores]
        assert np.mean(near) > 0.8  # a code that fell to the other side moves its own beam's score


@pytest.mark.parametrize(("case", "runtime"), [*((case, "onnxruntime") for case in CASES), ("fp8_tensor", "torch")])
def test_computes_what_the_reference_engine_computes(case: str, runtime: str, tmp_path: Path) -> None:
    recipe, config = CASES[case]
    flags = ("--engine", "tensorrt", "--recipe", recipe, "--mods", "none", "--trt-runtime", runtime)
    built = build_bundle(tmp_path, *flags, config=config)
    assert built.engine == "tensorrt"
    assert any(name == recipe for site, name in built.plan.recipes.items() if ".moe." not in site)
    stitched, reference = engines(built)
    batch = random_batch(built, requests=6, seed=1)
    traces = stitched.decoder.trace(batch)
    for level, (trace, wanted) in enumerate(zip(traces, logits_of(reference, batch, traces), strict=True)):
        live = torch.arange(trace.logits.shape[1]) < trace.counts[:, None]
        error = (trace.logits - wanted)[live].norm() / wanted[live].norm()
        assert error < LOGIT_TOLERANCE[recipe], f"level {level}"
    check_equal(stitched.recommend(batch), reference.recommend(batch), tolerance=0.05)


def test_sizes_from_nothing_to_the_limits(bundle: Bundle) -> None:
    stitched, reference = engines(bundle)
    nothing = EngineRequest(np.zeros((0, CONFIG.levels), np.int32), np.zeros(1, np.int32), 1)
    for requests in ((nothing,), (nothing, *random_batch(bundle, 7, 2, CONFIG.beam_width).requests)):
        batch = RequestBatch(requests)
        check_equal(stitched.recommend(batch), reference.recommend(batch), tolerance=0.05)
    with pytest.raises(EngineError, match="batch of 9 requests: expected 1 to 8"):
        stitched.recommend(random_batch(bundle, 9, 2))


def test_filters_and_another_catalog(bundle: Bundle) -> None:
    stitched, reference = engines(bundle)
    generator = np.random.default_rng(0)
    sids = np.stack([generator.integers(0, size, 400) for size in CONFIG.codebook_sizes], 1)
    larger = Catalog.build([f"other{index}" for index in range(400)], sids, codebook_sizes=CONFIG.codebook_sizes)
    for catalog in (bundle.catalog, larger):
        stitched.swap_catalog(catalog)
        reference.swap_catalog(catalog)
        first, second = random_batch(bundle, 2, 3).requests
        excluded = catalog.filter(range(0, len(catalog.item_ids), 2), {})
        batch = RequestBatch((dataclasses.replace(first, filter=excluded), second))
        check_equal(stitched.recommend(batch), reference.recommend(batch), tolerance=0.05)
        leaves = stitched.recommend(batch).leaves[0]
        assert all(excluded.allowed_nodes[-1][leaf] for leaf in leaves if leaf >= 0)


def test_a_bundle_without_plans_names_the_flag(bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    (copy / ARTIFACTS_FILE).unlink()
    with pytest.raises(BundleError, match="holds no tensorrt.json: build it with --engine tensorrt"):
        load_engine(dataclasses.replace(bundle, path=copy), "tensorrt", "cpu", LIMITS)


def test_plans_of_another_machine_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    rewrite(copy, ARTIFACTS_FILE, environment={"version": "11.4", "gpu": "NVIDIA H200"})
    with pytest.raises(
        EngineError, match=r"of another GPU or version \(gpu NVIDIA H200 there, None here; version 11.4"
    ):
        load_engine(dataclasses.replace(bundle, path=copy), "tensorrt", "cpu", LIMITS)


def test_damaged_steps_name_the_file(bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    rewrite(copy, ARTIFACTS_FILE, steps=[{"operation": "MoE"}])
    with pytest.raises(BundleError, match=r"tensorrt.json: not as the build writes it: KeyError\('inputs'\)"):
        load_engine(dataclasses.replace(bundle, path=copy), "tensorrt", "cpu", LIMITS)


def test_checksums_cover_the_artifacts(bundle: Bundle, tmp_path: Path) -> None:
    files = set(bundle.manifest["files"])
    assert {ARTIFACTS_FILE, "model.onnx", "segment-bos.onnx"} <= files
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    file = copy / "segment-bos.onnx"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(BundleError, match="segment-bos.onnx: changed since it was written"):
        Bundle.load(copy)
