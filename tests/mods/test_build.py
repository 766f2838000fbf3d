"""The build with mods: on by default, recorded, shown, and the same answers in BF16."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loka_serve.build import EXIT_ERROR, main
from loka_serve.bundle import Bundle, write_manifest
from loka_serve.errors import BundleError
from loka_serve.models.checkpoint import WEIGHTS_FILE, save_checkpoint
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.models.parts import split_parts
from loka_serve.mods.names import EXACT_MODS
from tests.building import CONFIG, build_arguments
from tests.mods.models import make_model

SITES = ("layers.1.moe.gate_up", "layers.1.moe.shared.gate_up")


def build(folder: Path, model: OneRecV2, *more: str) -> int:
    """Build `folder/bundle` of a model."""
    arguments = build_arguments(folder, *more)
    save_checkpoint(model, folder / "checkpoint")
    return main(arguments)


def hostile() -> OneRecV2:
    """One norm has an outlier channel that the weights after it make up for: FP8 loses all other channels."""
    model = OneRecV2(CONFIG).initialize(0)
    ffn = model.layers[1]
    ffn.ffn_norm.weight.data[7] = 2.0**18
    for weight in (ffn.moe.router.weight, ffn.moe.gate_up.weight, ffn.moe.shared.gate_up.weight):
        weight.data[..., 7] *= 2.0**-18
    return model


def test_sites_become_safe_and_the_bundle_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path, hostile(), "--mods", "none") == 0
    bundle = Bundle.load(tmp_path / "bundle")
    assert {bundle.plan[site] for site in SITES} == {"bf16"}
    assert bundle.mods == [] and bundle.manifest["details"]["mods"]["asked"] == []
    assert "mods: none changed anything" in capsys.readouterr().out
    assert build(tmp_path, hostile()) == 0
    output = capsys.readouterr().out
    bundle = Bundle.load(tmp_path / "bundle")
    assert [bundle.plan[site] for site in SITES] == ["fp8_block", "fp8_row"]
    # A fold moves at most 14 octaves; what is left of the outlier is smoothed.
    assert bundle.mods == ["fold_norm_gains", "smooth"] and bundle.manifest["details"]["mods"]["asked"] == list(
        EXACT_MODS
    )
    told = bundle.probe["mods"]
    assert told["applied"] == [{"name": name, "exact": True, "rewrites": 1} for name in bundle.mods]
    assert {rewrite["target"] for rewrite in told["rewrites"]} == {"layers.1.ffn_norm"}
    for site in SITES:
        assert set(told["became_safe"][site]) == {"fp8_row", "fp8_block"}
        for errors in told["sites"][site].values():
            assert errors["before"] > 0.3 and errors["after"] < 0.12
        assert f"mods: {site} became safe: floored MERE of fp8_row " in output
    assert "mods: fold_norm_gains (1), smooth (1) (not exact, with --mods all: fold_whole_norm_gains: " in output


@pytest.mark.parametrize("mods", ["exact", "smooth,pad_widths"])
def test_bf16_answers_are_the_same_bit_for_bit(tmp_path: Path, mods: str) -> None:
    model = make_model(CONFIG)
    for out in ("none", mods):
        assert build(tmp_path, model, "--recipe", "bf16", "--mods", out, "--min-top-k-overlap", "1") == 0
        (tmp_path / "bundle").rename(tmp_path / out)
    plain, rewritten = (Bundle.load(tmp_path / out).load_model() for out in ("none", mods))
    history = torch.stack([torch.arange(6)[None] % size for size in CONFIG.codebook_sizes], -1)
    context = [m.prepare_context(history, torch.tensor([6]), torch.ones(1, 1).long()) for m in (plain, rewritten)]
    targets = torch.zeros(1, 1, 3, dtype=torch.long)
    with torch.inference_mode():
        left, right = (
            m.teacher_forced(c, targets, torch.tensor([[6]])) for m, c in zip((plain, rewritten), context, strict=True)
        )
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_checkpoint_that_holds_projections_apart(tmp_path: Path) -> None:
    build_arguments(tmp_path)
    file = tmp_path / "checkpoint" / WEIGHTS_FILE
    whole = load_file(file)
    parts = {part: tensor.contiguous() for name, t in whole.items() for part, tensor in split_parts(name, t).items()}
    save_file(parts, file)
    assert main(build_arguments(tmp_path)) == 0
    rewrites = [rewrite for rewrite in Bundle.load(tmp_path / "bundle").probe["mods"]["rewrites"]]
    fused = {rewrite["target"]: rewrite["detail"] for rewrite in rewrites if rewrite["mod"] == "fuse_projections"}
    assert len(fused) == 3 + 1 + 2 + 2  # attention; dense; routed and shared experts of two layers
    assert fused["layers.0.self_attention.qkv.weight"] == "query + key + value"


def test_padded_widths_are_the_bundles(tmp_path: Path) -> None:
    model = OneRecV2(dataclasses.replace(CONFIG, d_ff=120)).initialize(0)
    assert build(tmp_path, model, "--mods", "pad_widths") == 0
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.config.d_ff == 128 and bundle.mods == ["pad_widths"]
    assert bundle.load_model().config == bundle.config


def test_biases_are_served_and_refused_where_no_kernel_adds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = OneRecV2(dataclasses.replace(CONFIG, linear_bias=True)).initialize(0)
    model.layers[0].self_attention.qkv.bias.data[:] = 0.5
    assert build(tmp_path, model) == 0
    loaded = Bundle.load(tmp_path / "bundle").load_model()
    bias = loaded.layers[0].self_attention.qkv.bias
    assert bias is not None and bias.dtype == torch.float32
    assert bias[:64].eq(0.5).all() and not bias[64:].any()  # those of keys and values are folded
    assert loaded.layers[0].self_attention.output.bias is not None
    assert build(tmp_path, model, "--engine", "hopper") == EXIT_ERROR
    assert "config linear_bias true: the hopper engine runs linears without bias" in capsys.readouterr().err
    model.layers[0].self_attention.qkv.bias.data[:] = 0
    assert build(tmp_path, model, "--engine", "hopper") == 0
    assert not Bundle.load(tmp_path / "bundle").config.linear_bias
    assert build(tmp_path, model, "--engine", "hopper", "--mods", "none") == EXIT_ERROR


def test_bundles_of_other_times(tmp_path: Path) -> None:
    assert build(tmp_path, OneRecV2(CONFIG).initialize(0)) == 0
    path = tmp_path / "bundle"
    built = Bundle.load(path)

    def with_record(change: Callable[[dict[str, object]], object]) -> Bundle:
        details = dict(built.manifest["details"])
        change(details)
        write_manifest(path, built.model_name, built.engine, built.limits, details)
        return Bundle.load(path)

    older = with_record(lambda details: details.pop("mods"))
    assert older.mods == [] and older.load_model().config == older.config
    # Configurations from before there were variants lack their fields.
    values = json.loads((path / "config.json").read_text())
    for field in ("norm", "activation", "linear_bias"):
        del values[field]
    (path / "config.json").write_text(json.dumps(values))
    newer = with_record(lambda details: details.update(mods={"version": 2}))
    assert newer.config == older.config
    with pytest.raises(BundleError, match=r'bundle\.json: "details\.mods": expected an object of version 1'):
        _ = newer.mods


def test_unknown_mods_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(build_arguments(tmp_path, "--mods", "polish")) == EXIT_ERROR
    errors = capsys.readouterr().err
    assert errors.startswith("error: --mods: expected exact, none, all, or names out of fuse_projections, ")
    assert errors.count("\n") == 1
