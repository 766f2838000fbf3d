"""The engine as the benchmarks see it. Everything they know of `engines/hopper` is in `open_decoder`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.random_model import random_model
from benchmarks.yardstick import Shape
from loka_serve.catalog.trie import Trie
from loka_serve.engines.base import BeamResult, EngineLimits, RequestBatch
from loka_serve.models.config import OneRecV2Config
from loka_serve.quantization.apply import apply_plan
from loka_serve.quantization.plan import PrecisionPlan

Options = dict[str, Any]
"""`precision`, "bf16" or "fp8", and fields of `HopperOptions`."""


@dataclass(frozen=True)
class Decoder:
    """An engine that is being measured.

    Attributes:
        capture: prepares one bucket (batch, beam, context), so that no later call pays for it.
        submit: copies a batch in and starts it, and returns a ticket at once.
        collect: waits for a ticket's results on the host.
    """

    capture: Callable[[int, int, int], object]
    submit: Callable[[RequestBatch], Any]
    collect: Callable[[Any], BeamResult]


OpenDecoder = Callable[[OneRecV2Config, Trie | None, Sequence[Shape], torch.device, Options], Decoder]


def open_decoder(
    config: OneRecV2Config, trie: Trie | None, shapes: Sequence[Shape], device: torch.device, options: Options
) -> Decoder:
    """The Hopper engine with random weights, as large as the largest of the `shapes` that it will run."""
    from loka_serve.engines.hopper.buckets import Bucket, Buckets
    from loka_serve.engines.hopper.decoder import HopperDecoder
    from loka_serve.engines.hopper.options import HopperOptions
    from loka_serve.engines.hopper.tuning import default_dispatch_file, dispatch_for
    from loka_serve.engines.hopper.weights import pack_weights

    settings = dict(options)
    precision = settings.pop("precision")
    model = random_model(config, device)
    if precision == "fp8":
        apply_plan(model, fp8_plan(model.sites()), cache_weight=False)
    weights = pack_weights(model)
    batches, beams, contexts = (tuple(sorted(set(sizes))) for sizes in zip(*shapes, strict=True))
    hopper_options = HopperOptions(batches=batches, beams=beams, contexts=contexts, **settings)
    limits = EngineLimits(batches[-1], beams[-1], contexts[-1], config.levels)
    # A file for each precision, else each would overwrite what was measured for the other.
    kept = default_dispatch_file()
    dispatch_file = kept and kept.with_stem(f"benchmark-dispatch-{precision}")
    dispatch = dispatch_for(weights, Buckets.of(limits, hopper_options), device, dispatch_file)
    decoder = HopperDecoder(weights, trie, limits, device, hopper_options, dispatch)

    def capture(batch: int, beam: int, context: int) -> None:
        decoder.capture(Bucket(batch, beam, context))

    return Decoder(capture, decoder.submit, decoder.collect)


def fp8_plan(sites: Iterable[str]) -> PrecisionPlan:
    """Experts in blocks, shared ones too, so that they run in the same launches; routers in BF16; all else in rows."""

    def recipe(site: str) -> str:
        if site.endswith(".router"):
            return "bf16"
        return "fp8_block" if ".moe." in site else "fp8_row"

    return PrecisionPlan({site: recipe(site) for site in sites})
