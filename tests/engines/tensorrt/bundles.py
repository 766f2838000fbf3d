"""Small bundles for the tensorrt engine, built as the build builds them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from loka_serve.build import main
from loka_serve.bundle import Bundle
from loka_serve.engines.base import EngineRequest, RequestBatch
from loka_serve.models.config import OneRecV2Config
from tests.building import CONFIG, build_arguments, write_checkpoint

ROTARY = dataclasses.replace(CONFIG, position_encoding="rotary", norm="block", linear_bias=True)


def build_bundle(folder: Path, *flags: str, config: OneRecV2Config = CONFIG) -> Bundle:
    """A bundle of a random model; `flags` go to the build."""
    write_checkpoint(folder / "checkpoint", config)
    (folder / "again").mkdir()
    arguments = build_arguments(folder / "again", "--quiet", *flags)
    arguments[arguments.index("--checkpoint") + 1] = str(folder / "checkpoint")
    assert main(arguments) == 0
    return Bundle.load(folder / "again" / "bundle")


def random_batch(bundle: Bundle, requests: int, seed: int, beams: int | None = None) -> RequestBatch:
    """Histories of 0 to the most items and beam widths of 1 to the most, or `beams` for all."""
    generator, config = np.random.default_rng(seed), bundle.config
    batch = []
    for _ in range(requests):
        items = int(generator.integers(0, config.max_context + 1))
        history = np.stack([generator.integers(0, size, items) for size in config.codebook_sizes], 1).astype(np.int32)
        features = np.array([generator.integers(0, len(one.values) + 1) for one in config.features], np.int32)
        width = beams or int(generator.integers(1, config.beam_width + 1))
        batch.append(EngineRequest(history, features, width))
    return RequestBatch(tuple(batch))


def rewrite(directory: Path, name: str, **values: object) -> None:
    """Change fields of one of a bundle's JSON files, without its checksum."""
    content = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps({**content, **values}))
