"""The bundle's format: what is written is what loads, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loka_serve.build import main, run_as_bf16
from loka_serve.bundle import MANIFEST_FILE, Bundle, check_replaceable, publish, staging_directory, write_manifest
from loka_serve.engines.base import EngineLimits
from loka_serve.errors import BundleError
from loka_serve.models.checkpoint import load_checkpoint
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.apply import apply_plan
from loka_serve.tensor_files import TensorWriter, read_tensor_file
from tests.building import CONFIG, build_arguments


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    assert main(build_arguments(folder)) == 0
    return folder


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built / "bundle", tmp_path / "bundle"))


@torch.inference_mode()
def logits(model: OneRecV2) -> torch.Tensor:
    history = torch.randint(0, 9, (2, 7, 3), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([7, 0])
    context = model.prepare_context(history, lengths, torch.tensor([[1], [0]]))
    targets = torch.randint(0, 9, (2, 4, 3), generator=torch.Generator().manual_seed(1))
    return torch.cat(model.teacher_forced(context, targets, lengths[:, None].expand(-1, 4)), dim=-1)


def sign_again(path: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Write checksums that fit what is there now, as someone who tampers on purpose would."""
    old = json.loads((path / MANIFEST_FILE).read_text())
    write_manifest(path, old["model_name"], old["engine"], EngineLimits(**old["limits"]), old["details"])
    if edit is not None:
        from loka_serve.bundle import _manifest_bytes

        manifest = json.loads((path / MANIFEST_FILE).read_text())
        edit(manifest)
        (path / MANIFEST_FILE).write_bytes(_manifest_bytes(manifest))


def rewrite_weights(path: Path, change: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]]) -> None:
    entries = [entry for file in sorted(path.glob("weights-*")) for entry in read_tensor_file(file)]
    for file in path.glob("weights-*"):
        file.unlink()
    with TensorWriter(path, 1 << 30) as writer:
        for name, tensor in entries:
            for new_name, new_tensor in change(name, tensor):
                writer.write(new_name, new_tensor)
    sign_again(path)


def test_describes_the_model_and_its_catalog(built: Path) -> None:
    bundle = Bundle.load(built / "bundle")
    assert bundle.model_name == "checkpoint" and bundle.engine == "reference"
    assert bundle.limits == EngineLimits(batch=32, beam=CONFIG.beam_width, context=CONFIG.max_context, levels=3)
    assert bundle.config == CONFIG and bundle.config.features[0].values == ("new", "regular")
    assert bundle.catalog.version == bundle.manifest["details"]["catalog_version"]
    assert set(bundle.plan.recipes.values()) == {"bf16", "fp8_row", "fp8_block"}
    assert bundle.gate["passed"] is True and len(bundle.probe["sites"]) == len(bundle.plan.recipes)


def test_the_loaded_model_is_the_planned_one(built: Path) -> None:
    bundle = Bundle.load(built / "bundle")
    expected = load_checkpoint(built / "checkpoint")
    run_as_bf16(expected, cache_weight=False)  # embeddings as the bundle stores them
    apply_plan(expected, bundle.plan)
    assert torch.equal(logits(bundle.load_model()), logits(expected))
    # Without the cached copies a site's weight is dequantized in another shape: the same numbers.
    assert torch.equal(logits(bundle.load_model(cache_weight=False)), logits(expected))


def test_activations_flow_in_the_dtype_asked_for(built: Path) -> None:
    model = Bundle.load(built / "bundle").load_model(dtype=torch.bfloat16)
    assert model.bos.dtype == model.token_embeddings[0].weight.dtype == torch.bfloat16
    assert model.norms[0].weight.dtype == torch.float32
    reference = logits(Bundle.load(built / "bundle").load_model())
    # The bfloat16 residual moves FP8 roundings by whole steps, so the difference is about that of FP8 itself.
    assert 0 < ((logits(model) - reference).norm() / reference.norm()) < 0.2


def test_the_api_process_reads_a_bundle_without_torch(built: Path) -> None:
    code = (
        "import sys; from loka_serve.bundle import Bundle; "
        f"bundle = Bundle.load({str(built / 'bundle')!r}); assert bundle.catalog.item_count and bundle.plan.recipes; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_changed_byte_in_any_file_is_refused(bundle: Path) -> None:
    files = sorted(bundle.iterdir())
    assert len(files) == 11
    for file in files:
        content = file.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[place] ^= 1
            file.write_bytes(changed)
            with pytest.raises(BundleError) as caught:
                Bundle.load(bundle)
            assert file.name in str(caught.value), place
        file.write_bytes(content)
    Bundle.load(bundle)


def test_every_byte_of_the_manifest_counts(bundle: Path) -> None:
    content = (bundle / MANIFEST_FILE).read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        (bundle / MANIFEST_FILE).write_bytes(changed)
        with pytest.raises(BundleError, match=r"bundle\.json"):
            Bundle.load(bundle, verify=False)


def test_missing_and_truncated_files_are_refused_without_reading_them(bundle: Path) -> None:
    for file in sorted(bundle.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(BundleError, match=file.name):
            Bundle.load(bundle, verify=False)
        file.unlink()
        with pytest.raises(BundleError, match=file.name):
            Bundle.load(bundle, verify=False)
        file.write_bytes(content)


def test_another_weight_file_is_refused(bundle: Path) -> None:
    (bundle / "weights-f32-00002.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(BundleError, match=r"weights-f32-00002.safetensors: not part of the bundle"):
        Bundle.load(bundle)


def test_not_a_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(BundleError, match=r"not a bundle: expected a directory with bundle\.json"):
            Bundle.load(path)
    (tmp_path / MANIFEST_FILE).write_text('{"format": "other"}')
    with pytest.raises(BundleError, match="\"format\" is 'other'"):
        Bundle.load(tmp_path)


def test_another_format_version_is_refused(bundle: Path) -> None:
    sign_again(bundle, lambda manifest: manifest.update(format_version=2))
    with pytest.raises(BundleError, match="format version 2 is not supported: expected 1; build the bundle again"):
        Bundle.load(bundle)


def test_file_names_must_stay_in_the_bundle(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "weights-x").write_text("x")
    entry = {"bytes": 1, "sha256": "0" * 64}
    sign_again(bundle, lambda manifest: manifest["files"].update({"../weights-x": entry}))
    with pytest.raises(BundleError, match="'../weights-x' leads out of the bundle"):
        Bundle.load(bundle)


def test_a_manifest_must_list_the_required_files(bundle: Path) -> None:
    sign_again(bundle, lambda manifest: manifest["files"].pop("gate.json"))
    with pytest.raises(BundleError, match=r"does not list gate\.json"):
        Bundle.load(bundle)


def test_an_unreadable_configuration_is_named(bundle: Path) -> None:
    values = json.loads((bundle / "config.json").read_text()) | {"heads": 0}
    (bundle / "config.json").write_text(json.dumps(values))
    sign_again(bundle)
    with pytest.raises(BundleError, match="config heads = 0"):
        Bundle.load(bundle)


@pytest.mark.parametrize("depth", [400, 900, 100_000])
def test_json_that_nests_too_deeply_is_named(bundle: Path, depth: int) -> None:
    """At each of the depths something else gives up: the reader, or the writer that its checksum is found with."""
    deep = "[" * depth + "]" * depth
    manifest = (bundle / MANIFEST_FILE).read_text()
    (bundle / MANIFEST_FILE).write_text(f'{{"deep": {deep},' + manifest[1:])
    with pytest.raises(BundleError, match=r"bundle\.json: (not JSON: nested too deeply|changed since)"):
        Bundle.load(bundle)
    (bundle / MANIFEST_FILE).write_text(manifest)
    (bundle / "config.json").write_text(f'{{"model_type": "onerec_v2", "heads": {deep}}}')
    sign_again(bundle)
    with pytest.raises(BundleError, match=r"config\.json: not JSON: nested too deeply|config \w+ is missing"):
        Bundle.load(bundle)


SITE = "layers.0.mlp.down"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, tensor: [] if name == f"{SITE}.weight_scale" else [(name, tensor)],
            "missing tensor layers.0.mlp",
        ),
        (lambda name, tensor: [] if name == "bos" else [(name, tensor)], "missing tensor bos"),
        (
            lambda name, tensor: [(name, tensor)] + ([("surprise", tensor)] if name == "bos" else []),
            "unknown tensor surprise",
        ),
        (
            lambda name, tensor: [(name, tensor)] + ([(f"{SITE}.input_scale", tensor)] if name == "bos" else []),
            f"unknown tensor {SITE}.input_scale",
        ),
        (
            lambda name, tensor: [(name, tensor.float() if name == f"{SITE}.weight" else tensor)],
            r"layers\.0\.mlp\.down\.weight is torch\.float32 .*: expected torch\.float8_e4m3fn",
        ),
        (
            lambda name, tensor: [(name, tensor[:-1] if name == "bos" else tensor)],
            r"tensor bos is torch\.float32 \[63\]: expected torch\.float32 \[64\]",
        ),
    ],
)
def test_weights_that_do_not_fit_the_plan_are_refused(bundle: Path, change: Any, message: str) -> None:
    rewrite_weights(bundle, change)
    with pytest.raises(BundleError, match=message):
        Bundle.load(bundle).load_model()


def test_a_tensor_may_not_come_twice(bundle: Path) -> None:
    with TensorWriter(bundle, 1 << 30) as writer:
        writer.files.append(bundle / "weights-f32-00001.safetensors")  # so that the next one is 00002
        writer.write("bos", torch.zeros(64))
    sign_again(bundle)
    with pytest.raises(BundleError, match="tensor bos is there twice"):
        Bundle.load(bundle).load_model()


def test_a_plan_for_other_sites_is_refused(bundle: Path) -> None:
    plan = json.loads((bundle / "plan.json").read_text())
    del plan["recipes"]["heads.1"]
    (bundle / "plan.json").write_text(json.dumps(plan))
    sign_again(bundle)
    with pytest.raises(BundleError, match=r"no recipe for site heads\.1"):
        Bundle.load(bundle).load_model()


def test_only_bundles_are_replaced(bundle: Path, tmp_path: Path) -> None:
    check_replaceable(bundle)
    check_replaceable(tmp_path / "new")
    empty, other, file = tmp_path / "empty", tmp_path / "other", tmp_path / "file"
    empty.mkdir()
    check_replaceable(empty)
    other.mkdir()
    (other / "thesis.tex").touch()
    file.touch()
    for path in (other, file):
        with pytest.raises(BundleError, match="expected a new path or an older bundle"):
            check_replaceable(path)
    assert (other / "thesis.tex").exists()


def test_publishing_replaces_the_older_bundle_whole(bundle: Path, tmp_path: Path) -> None:
    with staging_directory(bundle) as stage:
        (stage / "only.txt").write_text("new")
        publish(stage, bundle)
    assert [path.name for path in bundle.iterdir()] == ["only.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_a_failed_build_leaves_the_older_bundle(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staging_directory(bundle) as stage:
        (stage / "half").touch()
        raise KeyboardInterrupt
    Bundle.load(bundle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_bundles_are_equal_for_equal_inputs(built: Path, tmp_path: Path) -> None:
    arguments = build_arguments(built)
    arguments[arguments.index("--out") + 1] = str(tmp_path / "again")
    assert main(arguments) == 0
    first, second = (json.loads((path / MANIFEST_FILE).read_text()) for path in (built / "bundle", tmp_path / "again"))
    assert first == second
    assert dataclasses.asdict(Bundle.load(tmp_path / "again").limits)["levels"] == 3
