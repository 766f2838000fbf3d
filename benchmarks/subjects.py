"""Models that the hopper engine and the reference engine are compared on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.decoders import fp8_plan
from benchmarks.measure import random_batches
from benchmarks.random_model import random_model
from loka_serve.bundle import Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.histories import read_histories
from loka_serve.engines.base import EngineLimits, EngineRequest
from loka_serve.engines.hopper.decoder import HopperDecoder
from loka_serve.engines.hopper.engine import HopperEngine
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.weights import pack_weights
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.models.config import PRESETS
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.histories import to_request
from loka_serve.quantization.apply import apply_plan


@dataclass(frozen=True)
class Subject:
    """A model in both engines.

    Attributes:
        reference: the reference engine whose activations are of a dtype.
        alone: how many of the requests are also run one by one.
    """

    recipes: list[str]
    decoder: Callable[[HopperOptions], HopperDecoder]
    reference: Callable[[torch.dtype], ReferenceEngine]
    requests: list[EngineRequest]
    batch: int
    alone: int


def requests_of(bundle: Bundle, histories: Path, rows: int, beam: int) -> list[EngineRequest]:
    """The first users of a file of histories, each with that many beams."""
    users = itertools.islice(read_histories(histories, bundle.catalog), rows)
    return [to_request(user, bundle.catalog, bundle.config, beam) for user in users]


def of_bundle(bundle: Bundle, histories: Path, device: torch.device, rows: int, batch: int, beam: int) -> Subject:
    """A bundle's model on the histories of a file."""
    config = bundle.config
    limits = EngineLimits(batch, beam, config.max_context, config.levels)
    requests = requests_of(bundle, histories, rows, beam)

    def decoder(options: HopperOptions) -> HopperDecoder:
        engine = HopperEngine(bundle, limits, device, options)
        engine.warmup()
        return engine.decoder

    def reference(dtype: torch.dtype) -> ReferenceEngine:
        model = bundle.load_model(device, dtype, cache_weight=True)
        return ReferenceEngine(model, bundle.catalog, limits, device)

    recipes = sorted(set(bundle.plan.recipes.values()))
    return Subject(recipes, decoder, reference, requests, batch, len(requests))


def of_preset(name: str, precision: str, device: torch.device, batch: int, beam: int, items: int = 200_000) -> Subject:
    """Random weights of a preset on random histories of its longest context, over random distinct items."""
    config = PRESETS[name]
    limits = EngineLimits(batch, beam, config.max_context, config.levels)
    sizes = config.codebook_sizes
    drawn = np.random.default_rng(0).integers(0, sizes, (items, len(sizes)))
    sids = np.unique(drawn, axis=0)
    catalog = Catalog.build([str(index) for index in range(len(sids))], sids, codebook_sizes=sizes)

    def model(dtype: torch.dtype, cache_weight: bool) -> OneRecV2:
        made = random_model(config, device).to(dtype)
        if precision == "fp8":
            apply_plan(made, fp8_plan(made.sites()), cache_weight=cache_weight)
        return made

    def decoder(options: HopperOptions) -> HopperDecoder:
        opened = HopperDecoder(pack_weights(model(torch.bfloat16, False)), catalog.trie, limits, device, options)
        for bucket in opened.buckets.all():
            opened.capture(bucket)
        return opened

    def reference(dtype: torch.dtype) -> ReferenceEngine:
        return ReferenceEngine(model(dtype, True), catalog, limits, device)

    requests = list(next(iter(random_batches(config, batch, beam, config.max_context))).requests)
    return Subject([precision], decoder, reference, requests, batch, len(requests))
