"""A bundle of random weights, written on the device in seconds: for benchmarks of what serves a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.decoders import fp8_plan
from benchmarks.random_model import random_model
from loka_serve.bundle import CATALOG_FILE, CONFIG_FILE, GATE_FILE, PLAN_FILE, PROBE_FILE, write_json, write_manifest
from loka_serve.bundle_weights import stored_dtype
from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import EngineLimits
from loka_serve.models.config import OneRecV2Config
from loka_serve.quantization.plan import PrecisionPlan
from loka_serve.quantization.recipes import RECIPES
from loka_serve.tensor_files import TensorWriter

SHARD_BYTES = 4 << 30


def random_catalog(items: int, codebook_sizes: tuple[int, ...], seed: int = 0) -> Catalog:
    """About so many items, `item-0` and on, of distinct semantic IDs drawn evenly."""
    drawn = np.random.default_rng(seed).integers(0, codebook_sizes, (items, len(codebook_sizes)))
    semantic_ids = np.unique(drawn, axis=0)
    names = [f"item-{index}" for index in range(len(semantic_ids))]
    return Catalog.build(names, semantic_ids, codebook_sizes=codebook_sizes)


def write_random_bundle(
    directory: Path, config: OneRecV2Config, precision: str, catalog: Catalog, device: torch.device, batch: int
) -> None:
    """Write what a build would, of weights that were never trained: the gate is open and the probe empty.

    Args:
        precision: `fp8`, as `decoders.fp8_plan` has it, or `bf16`.
        batch: the largest that it is to be served with.
    """
    directory.mkdir(parents=True)
    model = random_model(config, device)
    sites = model.sites()
    plan = fp8_plan(sites) if precision == "fp8" else PrecisionPlan.uniform(sites, "bf16")
    with TensorWriter(directory, SHARD_BYTES) as writer:
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight") not in sites:
                writer.write(name, parameter.data.to(stored_dtype(parameter)))
        for name, site in sites.items():
            assert site.weight is not None
            for key, tensor in RECIPES[plan[name]].quantize_weight(site.weight.data).items():
                writer.write(f"{name}.{key}", tensor)
    write_json(directory / CONFIG_FILE, config.to_dict())
    write_json(directory / PLAN_FILE, plan.to_dict())
    write_json(directory / PROBE_FILE, {"sites": []})
    write_json(directory / GATE_FILE, {"passed": None})
    catalog.save(directory / CATALOG_FILE)
    limits = EngineLimits(batch, config.beam_width, config.max_context, config.levels)
    write_manifest(directory, "random", "hopper", limits, {"catalog_version": catalog.version})
