"""The hopper engine's batches: context, every level's decode step and selection, launched without waiting once."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_serve.catalog.trie import Trie
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.batches import BatchDecoder
from loka_serve.engines.hopper.buckets import Bucket, Buckets
from loka_serve.engines.hopper.buffers import Inputs
from loka_serve.engines.hopper.forward import Forward
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.selection import select
from loka_serve.engines.hopper.trace import LevelTrace
from loka_serve.engines.hopper.weights import HopperWeights
from loka_serve.kernels.batch_invariant import BatchInvariantDispatch
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.kernels.level_head.reference import AdvancedBeams
from loka_serve.kernels.self_attention.triton import extend_ancestors

DEFAULT_OPTIONS = HopperOptions()


class HopperDecoder(BatchDecoder):
    """Runs batches of requests; see `HopperEngine` for the `Engine` that it serves.

    The device is a CUDA device of compute capability 9.0; `cpu` serves tests, through Triton's interpreter.
    """

    def __init__(
        self,
        weights: HopperWeights,
        trie: Trie | None,
        limits: EngineLimits,
        device: torch.device,
        options: HopperOptions = DEFAULT_OPTIONS,
        dispatch: Dispatch | None = None,
    ) -> None:
        """Make buffers for batches within `limits`.

        Args:
            weights: from `pack_weights`, on `device`.
            dispatch: which library runs which linear; None takes defaults.

        Raises:
            EngineError: limits that the kernels or the device's memory cannot hold.
        """
        self.weights = weights
        dispatch = dispatch or Dispatch.unmeasured(device)
        if options.batch_invariant:
            dispatch = BatchInvariantDispatch.unmeasured(device)
        self.forward = Forward(weights, dispatch, options)
        buckets = Buckets.of(limits, options)
        super().__init__(weights.config, weights.bytes, trie, limits, device, options, buckets)

    def compute(self, bucket: Bucket, inputs: Inputs) -> AdvancedBeams:
        config = self.config
        context = self.forward.context(inputs.history, inputs.lengths, inputs.features)
        cache = self.forward.new_cache(bucket.batch, bucket.beam)
        beam_counts = inputs.beam_widths.clamp(max=1)
        ancestors: Tensor | None = None
        beams: AdvancedBeams | None = None
        for level in range(config.levels):
            codes = None if beams is None else beams.codes
            logits = self.forward.step(codes, level, context, cache, ancestors, beam_counts)
            if self._traced is not None:
                self._traced.append(LevelTrace.of(beams, beam_counts, logits))
            catalog = self.catalog
            children = None if catalog is None else catalog.levels[level]
            capacity = None if catalog is None else catalog.room.capacity(level, bucket.beam)
            allowed = None if catalog is None else catalog.allowed(level, inputs)
            is_last = level == config.levels - 1
            beams = select(
                logits,
                beams,
                beam_counts,
                children,
                allowed,
                inputs.beam_widths,
                bucket.beam,
                capacity,
                is_last,
                self.options,
            )
            beam_counts = beams.counts
            if not is_last:
                ancestors = extend_ancestors(ancestors, beams.parents)
        assert beams is not None
        return beams
