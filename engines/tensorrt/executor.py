"""The stitched executor: segments in a runtime and `loka` nodes in our operations, over shared values, in one stream.

On a GPU a bucket's whole request is recorded as one CUDA graph, like the hopper engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loka_serve.catalog.trie import Trie
from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.batches import BatchDecoder
from loka_serve.engines.hopper.buckets import Bucket, Buckets
from loka_serve.engines.hopper.buffers import Inputs
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.trace import LevelTrace
from loka_serve.engines.tensorrt.operations.base import Operations
from loka_serve.engines.tensorrt.runtimes.base import Program
from loka_serve.engines.tensorrt.steps import BATCH, BEAMS, CONTEXT, OperationStep, SegmentStep, Stitching
from loka_serve.kernels.level_head.reference import AdvancedBeams, AllowedNodes, TrieLevel
from loka_serve.models.config import OneRecV2Config


@dataclass
class _Run:
    """What one batch has computed so far.

    Attributes:
        values: by name; dropped after their last reader, so that the allocator gives their memory to later ones.
        contexts: keys and values as attention takes them, by set.
        beams: after the last selection.
    """

    bucket: Bucket
    values: dict[str, Tensor]
    sizes: Mapping[str, int]
    contexts: dict[int, Any] = field(default_factory=dict)
    beams: AdvancedBeams | None = None

    def take(self, names: Sequence[str]) -> list[Tensor]:
        return [self.values[name] for name in names]


class StitchedDecoder(BatchDecoder):
    """Runs the steps of a stitching for each batch.

    Args:
        programs: by segment.
        operations: what runs nodes of domain `loka`.
    """

    def __init__(
        self,
        config: OneRecV2Config,
        stitching: Stitching,
        programs: Mapping[str, Program],
        operations: Operations,
        weight_bytes: int,
        trie: Trie | None,
        limits: EngineLimits,
        device: torch.device,
        options: HopperOptions,
        buckets: Buckets,
    ) -> None:
        """Raises EngineError: limits that the kernels or the device's memory cannot hold."""
        self.stitching, self.programs, self.operations = stitching, programs, operations
        self.segments = {segment.name: segment for segment in stitching.segments}
        self.releases = _last_reads(stitching)
        self.handlers: dict[str, Callable[[_Run, OperationStep], Sequence[Tensor]]] = {
            "EmbedContext": self._embed_context,
            "RotateKeys": self._rotate_keys,
            "BeamAttention": self._beam_attention,
            "SelfBeamAttention": self._self_attention,
            "MoE": self._experts,
            "LevelSelect": self._select,
        }
        super().__init__(config, weight_bytes, trie, limits, device, options, buckets)
        scratch = max(program.scratch_bytes for program in programs.values())
        if scratch:
            # One for all: they run one after another.
            self.scratch = torch.empty(scratch, dtype=torch.uint8, device=device)
            for program in programs.values():
                program.use_scratch(self.scratch)

    @torch.inference_mode()
    def compute(self, bucket: Bucket, inputs: Inputs) -> AdvancedBeams:
        run = self._start(bucket, inputs)
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.on_gpu else 0
        for step, released in zip(self.stitching.steps, self.releases, strict=True):
            if isinstance(step, SegmentStep):
                self._segment(run, step, stream)
            else:
                made = self.handlers[step.operation](run, step)
                run.values.update(zip(step.outputs, made, strict=True))
            for name in released:
                del run.values[name]
        assert run.beams is not None
        return run.beams

    def _start(self, bucket: Bucket, inputs: Inputs) -> _Run:
        values = {
            "history": inputs.history,
            "lengths": inputs.lengths,
            "features": inputs.features,
            "beam_widths": inputs.beam_widths,
            "filtered": inputs.filtered,
            "present": inputs.beam_widths.clamp(max=1),
            "begin": torch.zeros_like(inputs.beam_widths),
        }
        if self.catalog is not None:
            for level, trie in enumerate(self.catalog.levels):
                values[f"first_child_{level}"], values[f"codes_{level}"] = trie.first_child, trie.codes
                values[f"allowed_{level}"] = self.catalog.filters[level][: bucket.batch]
        sizes = {
            BATCH: bucket.batch,
            BEAMS: bucket.batch * bucket.beam,
            CONTEXT: bucket.batch * (1 + bucket.context),
        }
        return _Run(bucket, values, sizes)

    def _segment(self, run: _Run, step: SegmentStep, stream: int) -> None:
        segment, rows = self.segments[step.segment], run.sizes[step.rows]
        inputs = {spec.name: run.values[name] for spec, name in zip(segment.inputs, step.inputs, strict=True)}
        outputs = {
            spec.name: torch.empty((rows, *spec.shape), dtype=getattr(torch, spec.dtype), device=self.device)
            for spec in segment.outputs
        }
        self.programs[step.segment].run(inputs, outputs, stream)
        run.values.update(zip(step.outputs, outputs.values(), strict=True))

    # nodes of domain `loka`

    def _embed_context(self, run: _Run, step: OperationStep) -> Sequence[Tensor]:
        history, lengths, features = run.take(step.inputs)
        return [self.operations.embed_context(history, lengths.clamp(min=0), features)]

    def _rotate_keys(self, run: _Run, step: OperationStep) -> Sequence[Tensor]:
        keys, lengths = run.take(step.inputs)
        groups, head_dim = step.attributes["groups"], step.attributes["head_dim"]
        wide = keys.view(len(lengths), -1, groups, head_dim)
        return [self.operations.rotate_keys(wide, step.attributes["theta"]).reshape(keys.shape).contiguous()]

    def _beam_attention(self, run: _Run, step: OperationStep) -> Sequence[Tensor]:
        query, keys, values, lengths, counts = run.take(step.inputs)
        given, batch = step.attributes, len(lengths)
        slots = (lengths + 1).to(torch.int32)
        if given["kv_set"] not in run.contexts:
            wide = [part.view(batch, -1, given["groups"], given["head_dim"]) for part in (keys, values)]
            run.contexts[given["kv_set"]] = self.operations.context_form(wide[0], wide[1], slots)
        attended = self.operations.beam_attention(
            query.view(batch, -1, given["heads"], given["head_dim"]),
            run.contexts[given["kv_set"]],
            lengths.clamp(min=0),
            slots,
            counts,
            given["theta"],
        )
        return [attended.reshape(query.shape).contiguous()]  # segments read whole rows

    def _self_attention(self, run: _Run, step: OperationStep) -> Sequence[Tensor]:
        qkv, counts = run.take(step.inputs[:2])
        ancestors, *kept = (run.values.get(name) for name in step.inputs[2:])
        given = step.attributes
        heads, head_dim, batch = given["heads"], given["head_dim"], len(counts)
        keys, values = kept
        if keys is None or values is None:
            shape = (self.config.levels - 1, batch, run.bucket.beam, heads, head_dim)
            keys, values = (torch.empty(shape, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
        wide = qkv.view(batch, -1, 3, heads, head_dim)
        attended = self.operations.self_attention(wide, (keys, values), ancestors, counts, given["level"])
        return [attended.reshape(len(qkv), heads * head_dim).contiguous(), keys, values]

    def _experts(self, run: _Run, step: OperationStep) -> Sequence[Tensor]:
        normed, residual = run.take(step.inputs)
        return [self.operations.experts(step.attributes["layer"], normed, residual)]

    def _select(self, run: _Run, step: OperationStep) -> Sequence[Tensor]:
        names = step.inputs
        logits, counts, widths = run.take(names[:3])
        level, before = step.attributes["level"], run.beams
        if self._traced is not None:
            self._traced.append(LevelTrace.of(before, counts, logits))
        children = allowed = capacity = None
        if self.catalog is not None:
            first_child, codes, bits, filtered = run.take(names[7:11])
            children, allowed = TrieLevel(first_child, codes), AllowedNodes(bits, filtered)
            capacity = self.catalog.room.capacity(level, run.bucket.beam)
        is_last = not step.attributes["in_sid_order"]
        beams = self.operations.select(
            logits, before, counts, children, allowed, widths, run.bucket.beam, capacity, is_last
        )
        ancestors = beams.parents[:, :, None] if is_last else self._ancestors(run, names[6], beams)
        run.beams = beams
        return [beams.counts, beams.codes.reshape(-1), beams.nodes, beams.scores, beams.failed, ancestors]

    def _ancestors(self, run: _Run, name: str, beams: AdvancedBeams) -> Tensor:
        return self.operations.extend_ancestors(run.values.get(name), beams.parents)


def _last_reads(stitching: Stitching) -> list[list[str]]:
    """Values that nothing needs after each step: those that it reads last, and those that it makes for nothing."""
    last: dict[str, int] = {}
    for index, step in enumerate(stitching.steps):
        for name in (*step.inputs, *step.outputs):
            last[name] = index
    made = {name for step in stitching.steps for name in step.outputs} - set(stitching.outputs)
    released: list[list[str]] = [[] for _ in stitching.steps]
    for name, index in last.items():
        if name in made:
            released[index].append(name)
    return released
