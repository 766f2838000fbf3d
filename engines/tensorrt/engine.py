"""The `tensorrt` engine: a bundle whose dense segments run in the runtime that built them."""

from __future__ import annotations

import logging

import torch

from loka_serve.bundle import DISPATCH_FILE, Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import BeamResult, EngineLimits, RequestBatch
from loka_serve.engines.hopper.batches import IN_FLIGHT, Ticket
from loka_serve.engines.hopper.buckets import Bucket, Buckets
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.support import check_catalog, check_device, check_limits, check_model
from loka_serve.engines.tensorrt.artifacts import Artifacts
from loka_serve.engines.tensorrt.executor import StitchedDecoder
from loka_serve.engines.tensorrt.operations.base import Operations
from loka_serve.engines.tensorrt.runtimes import make_runtime
from loka_serve.engines.tensorrt.runtimes.base import Program
from loka_serve.engines.tensorrt.support import check_plan, runs_in_kernels
from loka_serve.errors import EngineError
from loka_serve.models.onerec_v2 import OneRecV2

logger = logging.getLogger(__name__)

DEFAULT_OPTIONS = HopperOptions()


class ExactBuckets(Buckets):
    """Without graphs nothing is gained by padding: every batch is a bucket of its own size."""

    def choose(self, batch: int, beam: int, context: int) -> Bucket:
        return Bucket(batch, beam, context)


class TensorRTEngine:
    """Serves a bundle on the CPU, one batch after another."""

    name = "tensorrt"

    def __init__(
        self,
        bundle: Bundle,
        limits: EngineLimits,
        device: torch.device | str,
        options: HopperOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Raises EngineError: a device, version or limit that the bundle's plans do not run on; BundleError: no plans.

        Options are the hopper engine's, whose kernels and graphs run what is between the segments on a GPU.
        """
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            check_device(self.device)
            check_model(bundle.config)
        check_limits(bundle.config, limits)
        check_plan(bundle.plan)
        check_catalog(bundle.catalog, bundle.config)
        artifacts = Artifacts.load(bundle.path)
        runtime = make_runtime(artifacts.runtime, self.device)
        if runtime.dtype != artifacts.dtype:
            raise EngineError(
                f"device {device}: the bundle's segments are {artifacts.dtype}, {runtime.dtype} runs here"
            )
        artifacts.check(runtime, limits)
        self.limits, self.catalog = limits, bundle.catalog
        operations = make_operations(bundle, self.device, options)
        programs: dict[str, Program] = {}
        plan_bytes = 0
        for segment in artifacts.stitching.segments:
            file = artifacts.plans.get(segment.name)
            plan = b"" if file is None else (bundle.path / file).read_bytes()
            programs[segment.name] = runtime.load(segment, plan)
            plan_bytes += len(plan)
        buckets = Buckets.of(limits, options) if on_gpu else ExactBuckets.of(limits, options)
        self.decoder = StitchedDecoder(
            bundle.config,
            artifacts.stitching,
            programs,
            operations,
            operations.weight_bytes + plan_bytes,
            bundle.catalog.trie,
            limits,
            self.device,
            options,
            buckets,
        )

    def warmup(self) -> None:
        """Run, and on a GPU capture, every bucket."""
        decoder = self.decoder
        for bucket in decoder.buckets.all() if decoder.on_gpu else decoder.buckets.all()[:1]:
            decoder.capture(bucket)
        logger.info("tensorrt engine ready; %s", decoder.memory.describe())

    def recommend(self, batch: RequestBatch) -> BeamResult:
        return self.decoder.collect(self.decoder.submit(batch))

    def swap_catalog(self, catalog: Catalog) -> None:
        check_catalog(catalog, self.decoder.config)
        self.decoder.swap_trie(catalog.trie)
        self.catalog = catalog


class AsynchronousTensorRTEngine(TensorRTEngine):
    """Serves a bundle on a GPU with two batches in flight."""

    in_flight = IN_FLIGHT

    def submit(self, batch: RequestBatch) -> Ticket:
        return self.decoder.submit(batch)

    def is_done(self, ticket: Ticket) -> bool:
        return self.decoder.is_done(ticket)

    def collect(self, ticket: Ticket) -> BeamResult:
        return self.decoder.collect(ticket)


def load_tensorrt_engine(
    bundle: Bundle, limits: EngineLimits, device: torch.device | str, options: HopperOptions = DEFAULT_OPTIONS
) -> TensorRTEngine:
    """The engine for a device; errors as in `TensorRTEngine`."""
    kind = AsynchronousTensorRTEngine if torch.device(device).type == "cuda" else TensorRTEngine
    return kind(bundle, limits, device, options)


def make_operations(bundle: Bundle, device: torch.device, options: HopperOptions) -> Operations:
    """What runs nodes of domain `loka`: our kernels on a GPU, their references on the CPU."""
    if device.type != "cuda":
        from loka_serve.engines.tensorrt.operations.reference import ReferenceOperations

        model = bundle.load_model(device)
        operations: Operations = ReferenceOperations(model)
        _drop_dense_sites(model)
        return operations
    from loka_serve.engines.tensorrt.operations.kernels import KernelOperations
    from loka_serve.kernels.dispatch import Dispatch

    model = bundle.load_model(device, torch.bfloat16, cache_weight=False)
    _drop_dense_sites(model)
    file = bundle.path / DISPATCH_FILE
    dispatch = Dispatch.load(file, device) if file.exists() else Dispatch.unmeasured(device)
    return KernelOperations(model, dispatch, options)


def _drop_dense_sites(model: OneRecV2) -> None:
    """Free what segments hold."""
    for name, site in model.sites().items():
        if not runs_in_kernels(name):
            site.weight, site.method = None, None
