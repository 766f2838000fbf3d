"""The `hopper` engine: a bundle on one Hopper GPU, whole requests in CUDA graphs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from loka_serve.bundle import DISPATCH_FILE, Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import BeamResult, DispatchInfo, EngineLimits, RequestBatch
from loka_serve.engines.hopper.batches import IN_FLIGHT, Ticket
from loka_serve.engines.hopper.buckets import Buckets
from loka_serve.engines.hopper.decoder import HopperDecoder
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.support import check_catalog, check_device, check_limits, check_model, check_plan
from loka_serve.engines.hopper.tuning import traced_dispatch_for
from loka_serve.engines.hopper.weights import pack_weights

logger = logging.getLogger(__name__)

DEFAULT_OPTIONS = HopperOptions()


class HopperEngine:
    """Serves a bundle; `submit` and `collect` keep two batches in flight, `recommend` is both in one."""

    name = "hopper"
    in_flight = IN_FLIGHT

    def __init__(
        self,
        bundle: Bundle,
        limits: EngineLimits,
        device: torch.device | str,
        options: HopperOptions = DEFAULT_OPTIONS,
        dispatch_file: Path | None = None,
    ) -> None:
        """Raises EngineError: a device, model or limit that the engine does not run; names it and what it runs.

        Also where `options.frozen_dispatch` is set and no dispatch table holds for this machine.
        """
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        check_device(self.device)
        check_model(bundle.config)
        check_limits(bundle.config, limits)
        check_plan(bundle.plan)
        check_catalog(bundle.catalog, bundle.config)
        buckets = Buckets.of(limits, options)
        self.limits, self.catalog = limits, bundle.catalog
        weights = pack_weights(bundle.load_model(self.device, torch.bfloat16, cache_weight=False))
        dispatch, self.dispatch_info = None, DispatchInfo("defaults", "off")
        if (options.tune or options.frozen_dispatch) and not options.batch_invariant:
            dispatch, self.dispatch_info = traced_dispatch_for(
                weights, buckets, self.device, dispatch_file, bundle.path / DISPATCH_FILE, options.frozen_dispatch
            )
        self.decoder = HopperDecoder(weights, bundle.catalog.trie, limits, self.device, options, dispatch)

    def warmup(self) -> None:
        """Compile every kernel and capture every bucket. Nothing is compiled or captured afterwards."""
        decoder = self.decoder
        before = reserved(self.device)
        for bucket in decoder.buckets.all():
            decoder.capture(bucket)
        decoder.memory.graphs = reserved(self.device) - before
        logger.info("%d buckets ready; %s", len(decoder.buckets.all()), decoder.memory.describe())

    def submit(self, batch: RequestBatch) -> Ticket:
        return self.decoder.submit(batch)

    def is_done(self, ticket: Ticket) -> bool:
        return self.decoder.is_done(ticket)

    def collect(self, ticket: Ticket) -> BeamResult:
        return self.decoder.collect(ticket)

    def recommend(self, batch: RequestBatch) -> BeamResult:
        return self.collect(self.submit(batch))

    def swap_catalog(self, catalog: Catalog) -> None:
        check_catalog(catalog, self.decoder.weights.config)
        self.decoder.swap_trie(catalog.trie)
        self.catalog = catalog


def reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
