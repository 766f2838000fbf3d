"""A small checkpoint, catalog and histories to build bundles from."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

from loka_serve.models.checkpoint import save_checkpoint
from loka_serve.models.config import PRESETS, FeatureConfig, OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2

CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    codebook_sizes=(12, 9, 15),
    max_context=20,
    features=(FeatureConfig("segment", ("new", "regular")),),
)
ITEMS = 150


def write_checkpoint(directory: Path, config: OneRecV2Config = CONFIG, seed: int = 0) -> Path:
    """A random `tiny` model."""
    save_checkpoint(OneRecV2(config).initialize(seed), directory)
    return directory


def write_catalog(path: Path) -> Path:
    """JSON lines of items with random semantic IDs; some share one."""
    generator = random.Random(0)
    rows = [
        {"item_id": f"item{index}", "semantic_id": [generator.randrange(size) for size in CONFIG.codebook_sizes]}
        for index in range(ITEMS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_histories(path: Path, users: int, seed: int = 0) -> Path:
    """JSON lines of histories with targets, now and then an unknown item or an empty history."""
    generator = random.Random(seed)
    rows = [
        {
            "user_id": f"user{user}",
            "history": [f"item{generator.randrange(ITEMS + 5)}" for _ in range(generator.randrange(30))],
            "target": [f"item{generator.randrange(ITEMS)}"],
            "features": {"segment": generator.choice(["new", "regular", "unheard of"])},
        }
        for user in range(users)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_arguments(folder: Path, *more: str, users: int = 24) -> list[str]:
    """Write the inputs into `folder` and give the arguments of `python -m loka_serve.build` for ``folder/bundle``."""
    if not (folder / "checkpoint").exists():
        write_checkpoint(folder / "checkpoint")
        write_catalog(folder / "items.jsonl")
        write_histories(folder / "histories.jsonl", users)
    paths = {"checkpoint": "checkpoint", "catalog": "items.jsonl", "calibration": "histories.jsonl", "out": "bundle"}
    arguments = [part for flag, name in paths.items() for part in (f"--{flag}", str(folder / name))]
    sizes = ["--calibration-rows", "8", "--gate-rows", "8", "--min-top-k-overlap", "0", "--device", "cpu"]
    sizes += ["--probe-pairs", "2", "--probe-cost-rows", "2"]
    return [*arguments, *sizes, *more]
