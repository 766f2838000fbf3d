"""Segments in torch on a GPU: compiled for any number of rows, they give what they give step by step."""

from __future__ import annotations

from pathlib import Path

import torch

from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.runtimes.torch import TorchRuntime
from tests.engines.tensorrt.weights import TINY, mixed_plan, random_model, write_weights


def test_compiled_segments_give_the_same(tmp_path: Path) -> None:
    model = random_model(TINY)
    plan = mixed_plan(model)
    stitching = export(TINY, plan, write_weights(tmp_path, model, plan), "bfloat16")
    compiled, eager = (TorchRuntime("cuda", compiled=fuse) for fuse in (True, False))
    for segment in stitching.segments:
        for rows in (1, 5, 32):
            generator = torch.Generator("cuda").manual_seed(rows)
            inputs = {
                spec.name: torch.randn(rows, *spec.shape, device="cuda", generator=generator).bfloat16()
                if spec.dtype == "bfloat16"
                else torch.zeros(rows, dtype=torch.int32, device="cuda")
                for spec in segment.inputs
            }
            found, wanted = (
                {
                    spec.name: torch.full((rows, *spec.shape), torch.nan, dtype=getattr(torch, spec.dtype)).cuda()
                    for spec in segment.outputs
                }
                for _ in range(2)
            )
            compiled.load(segment, b"").run(inputs, found)
            eager.load(segment, b"").run(inputs, wanted)
            for name, tensor in found.items():
                distance = (tensor.float() - wanted[name].float()).norm() / wanted[name].float().norm()
                # Fused, values are rounded to BF16 less often before they are quantized, so codes fall the other way:
                # 0.04 was seen behind four products on an H200, about one E4M3 rounding's error. Another path gives 1.
                assert distance < 0.08, (segment.name, rows, name)
