"""A hostile checkpoint: `auto` with mods keeps what it has on the unharmed one, where plain fp8_tensor collapses.

The groceries checkpoint is harmed by powers of two that cancel, so that its function in BF16 stays as it is and all
that changes is how far apart the numbers of a site are:

* `context.projection`: four channels of its inputs are 1024 times as large, their columns as much smaller, and the
  static slot is 1024 times as large as the items' (the norms after the projection take that back). Transformers make
  such massive activations by themselves, in a few fixed channels and most of all at the one position where attention
  looks when nothing fits, which the static slot is ("Massive Activations in Large Language Models", arXiv 2402.17762).
  Either alone E4M3 takes even with a single scale, as it has 15 octaves of full precision; both together it does not.
* `layers.1.moe`, expert 3: eight rows of `up` are 2**17 times as large, the columns of `down` that read them as much
  smaller. Nothing in training ties the two together, and SwiGLU is known to grow a few such units until FP8 training
  diverges ("Scaling FP8 training to trillion-token LLMs", arXiv 2409.12517). The factor is far beyond what was
  reported: it is to break the scales of a token and of a block, too, so that mods have something to mend.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.groceries.evaluate import CHECKPOINT
from examples.groceries.prepare import Sequences
from loka_serve.build import BuildOutcome, build, run_as_bf16
from loka_serve.build_config import BuildConfig
from loka_serve.catalog.readers import read_catalog
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.gate import Ranking, recommend_items
from loka_serve.models.checkpoint import load_checkpoint
from loka_serve.probe.choose import MAX_FLOORED_MERE
from loka_serve.probe.histories import sample_histories, to_request
from loka_serve.probe.report import SiteReport

BEAM = 64
TOP_K = 50
CALIBRATION_ROWS, GATE_ROWS, RANKED_ROWS = 8, 24, 8
EXPERT, EXPERT_WIDTH = 3, 128
PROJECTION, EXPERTS_DOWN = "context.projection", "layers.1.moe.down"
NAMES = (
    "unharmed, fp8_tensor, none",
    "unharmed, auto, exact",
    "harmed, fp8_tensor, none",
    "harmed, auto, exact",
    "harmed, auto, none",
)
Builds = dict[str, BuildOutcome]


def harm(weights: dict[str, Tensor]) -> None:
    """What the module's docstring says, in place; powers of two are exact in BF16."""
    items = [weights[f"context.item_embeddings.{level}.weight"] for level in range(3)]
    static = [tensor for name, tensor in weights.items() if name.startswith("context.feature_embeddings.")]
    static.append(weights["context.static"])
    for table in static:
        table *= 1024
    outliers = torch.stack([table.float().abs().amax(0) for table in items]).sum(0).topk(4).indices
    for table in (*items, *static):
        table[..., outliers] *= 1024
    weights[f"{PROJECTION}.weight"][:, outliers] /= 1024

    up = weights["layers.1.moe.gate_up.weight"][EXPERT, EXPERT_WIDTH:]
    units = up.float().norm(dim=1).topk(8).indices
    up[units] *= 2.0**17
    weights[f"{EXPERTS_DOWN}.weight"][EXPERT][:, units] /= 2.0**17


def write_checkpoint(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The committed checkpoint with its weights changed, and as few beams as the overlap needs."""
    directory.mkdir()
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "beam_width": BEAM}))
    weights = load_file(CHECKPOINT / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    return directory


def rank_in_bf16(checkpoint: Path, data: Path) -> list[Ranking]:
    model = load_checkpoint(checkpoint, torch.device("cpu"))
    run_as_bf16(model, cache_weight=True)
    config = model.config
    catalog = read_catalog(data / "catalog.jsonl", config.codebook_sizes)
    histories, _ = sample_histories(data / "histories.jsonl", None, catalog, RANKED_ROWS, RANKED_ROWS, 0)
    limits = EngineLimits(RANKED_ROWS, BEAM, config.max_context, config.levels)
    engine = ReferenceEngine(model, catalog, limits, torch.device("cpu"))
    return recommend_items(engine, catalog, [to_request(row, catalog, config, BEAM) for row in histories], TOP_K)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "unharmed": write_checkpoint(folder / "unharmed", lambda weights: None),
        "harmed": write_checkpoint(folder / "harmed", harm),
    }


@pytest.fixture(scope="module")
def builds(
    prepared: tuple[Path, Sequences], checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Builds:
    """Builds by their names, "checkpoint, recipe, mods"; each compares itself with its checkpoint in BF16."""
    folder, data = tmp_path_factory.mktemp("bundles"), prepared[0]
    outcomes = {}
    for name in NAMES:
        checkpoint, recipe, mods = name.split(", ")
        config = BuildConfig(
            checkpoint=checkpoints[checkpoint],
            catalog=data / "catalog.jsonl",
            calibration=data / "histories.jsonl",
            out=folder / name,
            recipe=recipe,
            mods=mods,
            calibration_rows=CALIBRATION_ROWS,
            gate_rows=GATE_ROWS,
            gate_top_k=TOP_K,
            min_top_k_overlap=0,
            probe_pairs=0,
            probe_cost_rows=0,
            device="cpu",
            cpu_threads=1,
            quiet=True,
        )
        outcomes[name] = build(config)
    return outcomes


def overlap(builds: Builds, name: str) -> float:
    return builds[name].gate.top_k_overlap


def site(builds: Builds, build_name: str, site_name: str) -> SiteReport:
    return next(report for report in builds[build_name].sites if report.name == site_name)


def test_harm_leaves_the_function_as_it_is(checkpoints: dict[str, Path], prepared: tuple[Path, Sequences]) -> None:
    before = rank_in_bf16(checkpoints["unharmed"], prepared[0])
    after = rank_in_bf16(checkpoints["harmed"], prepared[0])
    for ours, theirs in zip(after, before, strict=True):
        assert len(theirs.items) == TOP_K and ours.items == theirs.items
        # The norm's epsilon counts for less beside a static slot of 1024 times the size: below BF16's digits.
        assert ours.scores == pytest.approx(theirs.scores, abs=0.01)


def test_plain_fp8_tensor_collapses(builds: Builds) -> None:
    assert overlap(builds, "unharmed, fp8_tensor, none") > 0.9  # so it is the harm that does it
    assert overlap(builds, "harmed, fp8_tensor, none") < 0.7
    for name in (PROJECTION, EXPERTS_DOWN):  # each harm has its share: the bound is the one that recipes are chosen by
        before, after = (site(builds, f"{which}, fp8_tensor, none", name) for which in ("unharmed", "harmed"))
        assert before.errors["fp8_tensor"].output.floored_mere < MAX_FLOORED_MERE
        assert after.errors["fp8_tensor"].output.floored_mere > MAX_FLOORED_MERE


def test_auto_with_mods_keeps_what_it_has_on_the_unharmed_checkpoint(builds: Builds) -> None:
    unharmed = overlap(builds, "unharmed, auto, exact")
    assert unharmed > 0.9  # the design's bar for a trained checkpoint
    assert overlap(builds, "harmed, auto, exact") >= unharmed - 0.03


def test_what_was_harmed_is_fp8_again_through_mods(builds: Builds) -> None:
    """Not by leaving the sites in BF16, which `auto` without mods must do with the experts."""
    harmed = site(builds, "harmed, auto, none", EXPERTS_DOWN)
    assert harmed.choice.recipe == "bf16" and f"in group {EXPERT} is not below" in harmed.choice.reason
    for name in (PROJECTION, EXPERTS_DOWN):
        choices = [site(builds, f"{checkpoint}, auto, exact", name).choice for checkpoint in ("unharmed", "harmed")]
        assert choices[0].recipe == choices[1].recipe and choices[0].recipe.startswith("fp8_")
    assert set(builds["harmed, auto, exact"].mods.became_safe()) == {EXPERTS_DOWN}
    assert builds["unharmed, auto, exact"].mods.became_safe() == {}
