"""What the engine holds of the device's memory, and the refusal of what it cannot hold, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loka_serve.engines.hopper.buckets import Bucket
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.errors import EngineError
from loka_serve.models.config import OneRecV2Config

GIB = 1 << 30


@dataclass
class MemoryReport:
    """Bytes of the device by purpose; `total` is 0 without a CUDA device.

    Attributes:
        weights, catalog, buffers: tensors that stay. workspaces: what the largest bucket was estimated to need.
        graphs: what warming up and capturing all buckets added.
    """

    device: torch.device
    total: int
    free: int
    weights: int
    catalog: int = 0
    buffers: int = 0
    workspaces: int = 0
    graphs: int = 0

    @classmethod
    def of(cls, device: torch.device, weights: int) -> MemoryReport:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        # What this process's allocator keeps but does not use is free to it.
        if device.type == "cuda":
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls(device, total, free, weights)

    def require(self, workspaces: int, bucket: Bucket, options: HopperOptions) -> None:
        """Raises EngineError where workspaces of that many bytes would not fit beside the weights."""
        self.workspaces = workspaces
        room = self.free - int((1.0 - options.memory_share) * self.total)
        if self.total and workspaces > room:
            raise EngineError(
                f"limits batch {bucket.batch}, beam {bucket.beam}, context {bucket.context}: need "
                f"{workspaces / GIB:.1f} GiB of workspaces beside {self.weights / GIB:.1f} GiB of weights, but "
                f"{max(room, 0) / GIB:.1f} GiB of {self.total / GIB:.1f} GiB are free: lower a limit"
            )

    def require_catalog(self, catalog: int, options: HopperOptions) -> None:
        """Raises EngineError where a larger catalog's buffers, of that many bytes, would not fit.

        They are made beside those in use, and graphs are captured anew, for which each bucket runs once.
        """
        if not self.total:
            return
        room = self.free_now() - int((1.0 - options.memory_share) * self.total)
        if catalog + self.workspaces > room:
            raise EngineError(
                f"catalog: outgrows its room, and a larger one needs {catalog / GIB:.2f} GiB and "
                f"{self.workspaces / GIB:.2f} GiB of workspaces beside what is held, but {max(room, 0) / GIB:.2f} GiB "
                f"of {self.total / GIB:.2f} GiB are free: start anew with it, or with more headroom or lower limits"
            )

    def free_now(self) -> int:
        """Bytes of the device that are free, what this process's allocator kept without use included."""
        torch.cuda.empty_cache()  # not what graphs use: that is reserved, mostly not allocated, and not free
        return torch.cuda.mem_get_info(self.device)[0]

    def describe(self) -> str:
        """One line for the log."""
        parts = ("weights", "catalog", "buffers", "workspaces", "graphs")
        held = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in parts)
        return f"device memory in GiB: {held}; {self.free / GIB:.2f} of {self.total / GIB:.2f} were free at start"


def workspace_bytes(config: OneRecV2Config, bucket: Bucket, options: HopperOptions) -> int:
    """An upper estimate of what a bucket's largest step holds at once, in bytes."""
    rows = bucket.batch * bucket.beam
    slots = bucket.batch * (bucket.context + 1)
    attention = config.heads * config.head_dim
    cache = 2 * config.layers * (config.levels - 1) * rows * attention * 2
    logits = 2 * rows * max(config.codebook_sizes) * 4
    # Residual, norm in two forms, query, key, value, attended, output: bfloat16 or less.
    activations = 2 * rows * (6 * config.d_model + 5 * attention + 3 * config.d_ff)
    expert_rows = rows * (config.experts_per_token + config.shared_experts) + config.experts * 128
    experts = expert_rows * (2 * config.expert_width + 2 * config.d_model + 4) if config.experts else 0
    keys = slots * config.d_context * (2 if options.context_precision == "bf16" else 4)
    context = slots * (2 * 2 * config.d_model + 2 * config.d_context) + keys
    return cache + max(logits + activations, activations + experts, context) + keys
