"""Batches in flight over buffers at fixed addresses, one CUDA graph a bucket; what a batch computes is the subclass's.

A batch is submitted and collected; one may be submitted while another computes, so that the host's share of the work
hides behind the device's. Everything happens on one stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.catalog.trie import Trie
from loka_serve.engines.base import BeamResult, EngineLimits, RequestBatch, check_batch
from loka_serve.engines.hopper.buckets import Bucket, Buckets
from loka_serve.engines.hopper.buffers import CatalogBuffers, CatalogRoom, Inputs, Outputs
from loka_serve.engines.hopper.memory import MemoryReport, workspace_bytes
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.support import check_limits
from loka_serve.engines.hopper.trace import LevelTrace
from loka_serve.errors import EngineError
from loka_serve.kernels.level_head.reference import AdvancedBeams
from loka_serve.models.config import OneRecV2Config

IN_FLIGHT = 2


@dataclass
class Ticket:
    """A submitted batch: where its results arrive, and when."""

    requests: int
    bucket: Bucket
    slot: int
    started: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


@dataclass
class _Slot:
    """The host's end of one batch in flight."""

    inputs: Tensor
    outputs: Outputs
    busy: bool = False


class BatchDecoder(ABC):
    """Runs batches of requests.

    Attributes:
        trie: SIDs that exist; None decodes without constraint, where a leaf is only its last code (for benchmarks).
        device: a CUDA device, or the CPU, where there are no graphs.
    """

    def __init__(
        self,
        config: OneRecV2Config,
        weight_bytes: int,
        trie: Trie | None,
        limits: EngineLimits,
        device: torch.device,
        options: HopperOptions,
        buckets: Buckets,
    ) -> None:
        """Raises EngineError: limits that the kernels or the device's memory cannot hold."""
        self.config, self.trie, self.limits, self.device, self.options = config, trie, limits, device, options
        self.on_gpu = device.type == "cuda"
        check_limits(config, limits)
        self.buckets = buckets
        self.graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self.warm: set[Bucket] = set()
        self._traced: list[LevelTrace] | None = None
        self.memory = MemoryReport.of(device, weight_bytes)
        self.memory.require(workspace_bytes(config, self._largest(), options), self._largest(), options)
        with self._on_stream():
            self._allocate()

    @abstractmethod
    def compute(self, bucket: Bucket, inputs: Inputs) -> AdvancedBeams:
        """The last level's beams of a batch, best first; waits for nothing, so that a graph can record it."""

    def _largest(self) -> Bucket:
        return Bucket(self.limits.batch, self.limits.beam, self.limits.context)

    def _allocate(self) -> None:
        config, largest = self.config, self._largest()
        numbers = Inputs.numbers(largest, config.levels, len(config.features))
        self.inputs = torch.zeros(numbers, dtype=torch.int32, device=self.device)
        self.outputs = Outputs.allocate(largest.batch, largest.beam, self.device)
        self.slots = [
            _Slot(
                torch.zeros(numbers, dtype=torch.int32, pin_memory=self.on_gpu),
                Outputs.allocate(largest.batch, largest.beam, "cpu", pinned=self.on_gpu),
            )
            for _ in range(IN_FLIGHT)
        ]
        self.memory.buffers = self.inputs.nbytes + self.outputs.bytes
        self.catalog: CatalogBuffers | None = None
        if self.trie is not None:
            self._hold(self.trie, self._room_for(self.trie))

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Everything of this decoder happens in the order of its one stream."""
        if not self.on_gpu:
            yield
            return
        if not hasattr(self, "stream"):
            self.stream = torch.cuda.Stream(self.device)
            self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), torch.inference_mode():
            yield

    # a batch

    def submit(self, batch: RequestBatch) -> Ticket:
        """Enqueue a batch. At most `IN_FLIGHT` are on their way at once.

        Raises:
            EngineError: a batch beyond the limits, or a third one on its way.
        """
        config = self.config
        check_batch(batch, self.limits, len(config.features), config.codebook_sizes)
        slot = next((index for index, slot in enumerate(self.slots) if not slot.busy), None)
        if slot is None:
            raise EngineError(f"{IN_FLIGHT} batches are on their way: collect one before submitting another")
        requests = batch.requests
        bucket = self.buckets.choose(
            len(requests),
            max(request.beam_width for request in requests),
            max(len(request.history) for request in requests),
        )
        started = time.perf_counter()
        held = self.slots[slot]
        numbers = Inputs.numbers(bucket, config.levels, len(config.features))
        Inputs.view(held.inputs, bucket, config.levels, len(config.features)).fill(requests)
        with self._on_stream():
            events = self._events()
            if events:
                events[0].record()
            self.inputs[:numbers].copy_(held.inputs[:numbers], non_blocking=True)
            if self.catalog is not None:
                self.catalog.send(requests, slot)
            self._launch(bucket)
            held.outputs.view(bucket).copy_from(self.outputs.view(bucket))
            if events:
                events[1].record()
        held.busy = True
        return Ticket(len(requests), bucket, slot, started, events)

    def trace(self, batch: RequestBatch) -> list[LevelTrace]:
        """Every level's logits of a batch, which runs kernel by kernel, outside of the graphs. For comparisons.

        Raises EngineError while a batch is on its way, and as `submit`.
        """
        if any(slot.busy for slot in self.slots):
            raise EngineError("a batch is on its way: collect it before tracing another")
        graphs, self.graphs, self._traced = self.graphs, {}, []
        try:
            self.collect(self.submit(batch))
            return self._traced
        finally:
            self.graphs, self._traced = graphs, None

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if not self.on_gpu:
            return None
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def is_done(self, ticket: Ticket) -> bool:
        """Whether `collect` would not wait. Raises RuntimeError where the device has failed."""
        return ticket.events is None or ticket.events[1].query()

    def collect(self, ticket: Ticket) -> BeamResult:
        """Wait for a batch's results. Its place is free for another one then, whatever happens."""
        slot = self.slots[ticket.slot]
        timings = {}
        try:
            if ticket.events:
                ticket.events[1].synchronize()
                timings["device"] = ticket.events[0].elapsed_time(ticket.events[1]) / 1e3
            timings["engine"] = time.perf_counter() - ticket.started
            return slot.outputs.view(ticket.bucket).to_result(ticket.requests, timings)
        finally:
            slot.busy = False

    # a bucket

    def capture(self, bucket: Bucket) -> None:
        """Run a bucket once kernel by kernel, which compiles what it needs, then record it as a graph."""
        try:
            with self._on_stream():
                if bucket not in self.warm:
                    self._clear_inputs(bucket)
                    self._run(bucket)
                    self.warm.add(bucket)
                if self.on_gpu and self.options.graphs and bucket not in self.graphs:
                    torch.cuda.synchronize(self.device)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                        self._run(bucket)
                    self.graphs[bucket] = graph
        except torch.cuda.OutOfMemoryError as error:
            raise EngineError(f"{bucket} does not fit the device's memory: {self.memory.describe()}") from error

    def _clear_inputs(self, bucket: Bucket) -> None:
        """One beam wide of the shortest history: valid whatever the catalog is."""
        inputs = Inputs.view(self.inputs, bucket, self.config.levels, len(self.config.features))
        for part in (inputs.history, inputs.lengths, inputs.features, inputs.filtered):
            part.zero_()
        inputs.beam_widths.fill_(bucket.beam)

    def _launch(self, bucket: Bucket) -> None:
        graph = self.graphs.get(bucket)
        if graph is not None:
            graph.replay()
        else:
            self._run(bucket)

    def _run(self, bucket: Bucket) -> None:
        config = self.config
        inputs = Inputs.view(self.inputs, bucket, config.levels, len(config.features))
        beams = self.compute(bucket, inputs)
        self.outputs.view(bucket).copy_from(Outputs(beams.nodes, beams.scores, beams.counts, beams.failed))

    # the catalog

    def swap_trie(self, trie: Trie) -> None:
        """Decode within another trie from the next batch on; graphs are captured anew only if it outgrows its room.

        Raises:
            EngineError: a batch is on its way, or the trie does not fit the memory; the one before stays.
        """
        if any(slot.busy for slot in self.slots):
            raise EngineError("a batch is on its way: collect it before swapping the catalog")
        assert self.catalog is not None
        with self._on_stream():
            if self.catalog.room.fits(trie):
                self.catalog.load(trie)
                self.trie = trie
            else:
                self._outgrow(trie)

    def _outgrow(self, trie: Trie) -> None:
        """Go over to a trie in new buffers with graphs of their own. Until all that is done the old ones are kept."""
        assert self.trie is not None
        room = self._room_for(self.trie, trie)  # of both, so that going back takes no more than a copy
        self.memory.require_catalog(room.bytes(self.limits.batch), self.options)
        before = self.trie, self.catalog, self.graphs, self.warm, self.memory.catalog
        try:
            self.graphs, self.warm = {}, set()
            self._hold(trie, room)
            for bucket in self.buckets.all():
                if bucket in before[3]:
                    self.capture(bucket)
        except Exception as error:
            self.trie, self.catalog, self.graphs, self.warm, self.memory.catalog = before
            if self.on_gpu:
                torch.cuda.synchronize(self.device)  # raises where the device is lost, not only this catalog
            # Others' texts may name files; the log has them, as the cause.
            reason = "out of memory" if isinstance(error, torch.cuda.OutOfMemoryError) else type(error).__name__
            reason = str(error) if isinstance(error, EngineError) else reason
            raise EngineError(f"catalog: does not go into larger buffers: {reason}") from error

    def _hold(self, trie: Trie, room: CatalogRoom) -> None:
        self.catalog = CatalogBuffers(trie, room, self.limits.batch, self.device, IN_FLIGHT)
        self.trie, self.memory.catalog = trie, self.catalog.bytes

    def _room_for(self, *tries: Trie) -> CatalogRoom:
        return CatalogRoom.of(tries, self.options.catalog_headroom, self.buckets.beams, self.config.codebook_sizes)
