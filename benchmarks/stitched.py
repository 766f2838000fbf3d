"""The stitched executor with segments in torch beside the hopper engine, on one GPU: what stitching costs.

python -m benchmarks.stitched --out benchmarks/results/h200/stitched.json [--batches 1 8 32] [--context 3000]

Both run a preset with random weights: experts in fp8_block in both; the other sites but the heads in fp8_row in the
hopper engine, which quantizes where it produces, and in fp8_tensor in the segments; or everything in bf16. The segments
alone are timed as one CUDA graph too. What is left is what our kernels between them take, so that is known which time
TensorRT's segments must stay below to be level with the hopper engine.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.decoders import Decoder
from benchmarks.environment import describe_environment
from benchmarks.measure import measure, random_batches
from benchmarks.random_model import random_model
from benchmarks.results import ResultFile, Row
from loka_serve.bundle_weights import stored_dtype
from loka_serve.command_line import CommandParser, duration, output_file, positive, run_command_line
from loka_serve.engines.base import EngineLimits, RequestBatch
from loka_serve.engines.hopper.batches import BatchDecoder
from loka_serve.engines.hopper.buckets import Bucket, Buckets
from loka_serve.engines.hopper.decoder import HopperDecoder
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.engines.hopper.tuning import default_dispatch_file, dispatch_for
from loka_serve.engines.hopper.weights import pack_weights
from loka_serve.engines.tensorrt.executor import StitchedDecoder
from loka_serve.engines.tensorrt.export import export
from loka_serve.engines.tensorrt.operations.kernels import KernelOperations
from loka_serve.engines.tensorrt.runtimes.torch import TorchRuntime
from loka_serve.engines.tensorrt.steps import BATCH, BEAMS, CONTEXT, SegmentStep, Stitching
from loka_serve.engines.tensorrt.support import runs_in_kernels
from loka_serve.errors import LokaError
from loka_serve.kernels.dispatch import Dispatch
from loka_serve.models.config import PRESETS, OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.quantization.apply import apply_plan
from loka_serve.quantization.plan import PrecisionPlan
from loka_serve.quantization.recipes import RECIPES
from loka_serve.tensor_files import TensorWriter

PRECISIONS = ("fp8", "bf16")
INPUT_AMAX = 8.0
"""Of every site in fp8_tensor: random weights were never calibrated, and time does not depend on it."""
REPLAYS = 20


@dataclass(frozen=True)
class Setting:
    """What both engines are opened with."""

    config: OneRecV2Config
    precision: str
    batches: tuple[int, ...]
    beam: int
    context: int
    device: torch.device

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.batches[-1], self.beam, self.context, self.config.levels)

    @property
    def options(self) -> HopperOptions:
        return HopperOptions(batches=self.batches, beams=(self.beam,), contexts=(self.context,))

    def plan(self, model: OneRecV2, dense: str) -> PrecisionPlan:
        """`dense` where segments compute, but for heads and routers."""

        def recipe(site: str) -> str:
            if self.precision == "bf16" or site.endswith(".router") or site.startswith("heads."):
                return "bf16"
            return "fp8_block" if runs_in_kernels(site) else dense

        return PrecisionPlan({site: recipe(site) for site in model.sites()})


def open_hopper(setting: Setting) -> tuple[HopperDecoder, Dispatch]:
    """The hopper engine, and the dispatch table that it measured or found."""
    model = random_model(setting.config, setting.device)
    if setting.precision == "fp8":
        apply_plan(model, setting.plan(model, "fp8_row"), cache_weight=False)
    weights = pack_weights(model)
    kept = default_dispatch_file()
    file = kept and kept.with_stem(f"benchmark-stitched-{setting.precision}")
    dispatch = dispatch_for(weights, Buckets.of(setting.limits, setting.options), setting.device, file)
    return HopperDecoder(weights, None, setting.limits, setting.device, setting.options, dispatch), dispatch


def open_stitched(setting: Setting, dispatch: Dispatch, directory: Path) -> StitchedDecoder:
    """The same weights in segments, written to `directory`; experts by the same dispatch table."""
    model = random_model(setting.config, setting.device)
    plan = setting.plan(model, "fp8_tensor")
    stitching = export(setting.config, plan, write_dense_weights(model, plan, directory), "bfloat16")
    runtime = TorchRuntime(setting.device)
    programs = {segment.name: runtime.load(segment, b"") for segment in stitching.segments}
    if setting.precision == "fp8":
        apply_plan(model, plan, dict.fromkeys(model.sites(), INPUT_AMAX), cache_weight=False)
    operations = KernelOperations(model, dispatch, setting.options)
    weight_bytes = operations.weight_bytes + sum(
        weight.nbytes for program in programs.values() for weight in program.weights
    )
    del model
    return StitchedDecoder(
        setting.config,
        stitching,
        programs,
        operations,
        weight_bytes,
        None,
        setting.limits,
        setting.device,
        setting.options,
        Buckets.of(setting.limits, setting.options),
    )


def write_dense_weights(model: OneRecV2, plan: PrecisionPlan, directory: Path) -> list[Path]:
    """What segments read: all but the experts."""
    sites = model.sites()
    with TensorWriter(directory, 4 << 30) as writer:
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight") not in sites and not runs_in_kernels(name):
                writer.write(name, parameter.data.to(stored_dtype(parameter)))
        for name, site in sites.items():
            if not runs_in_kernels(name):
                assert site.weight is not None
                for key, tensor in RECIPES[plan[name]].quantize_weight(site.weight.data, INPUT_AMAX).items():
                    writer.write(f"{name}.{key}", tensor)
    return writer.files


def segment_calls(stitching: Stitching, bucket: Bucket) -> list[tuple[str, int]]:
    """Segments in the order of their calls, each with its rows."""
    sizes = {
        BATCH: bucket.batch,
        BEAMS: bucket.batch * bucket.beam,
        CONTEXT: bucket.batch * (1 + bucket.context),
    }
    return [(step.segment, sizes[step.rows]) for step in stitching.steps if isinstance(step, SegmentStep)]


def time_segments(decoder: StitchedDecoder, bucket: Bucket) -> float:
    """Milliseconds of a bucket's segments alone, as one CUDA graph over inputs of their own."""
    segments = {segment.name: segment for segment in decoder.stitching.segments}
    calls: list[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]] = []
    made: dict[tuple[str, int], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for name, rows in segment_calls(decoder.stitching, bucket):
        if (name, rows) not in made:
            segment = segments[name]
            inputs, outputs = (
                {spec.name: _random(spec.dtype, (rows, *spec.shape), decoder.device) for spec in specs}
                for specs in (segment.inputs, segment.outputs)
            )
            made[name, rows] = inputs, outputs
        calls.append((name, *made[name, rows]))

    def run() -> None:
        stream = torch.cuda.current_stream(decoder.device).cuda_stream
        for name, inputs, outputs in calls:
            decoder.programs[name].run(inputs, outputs, stream)

    run()
    torch.cuda.synchronize(decoder.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times))


def _random(dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if dtype in ("int32", "int64"):
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    return torch.randn(shape, device=device).to(getattr(torch, dtype))


def time_decoder(decoder: BatchDecoder, batches: Sequence[RequestBatch], seconds: float) -> dict[str, float]:
    """Medians of a batch alone: from host to host, and on the device."""
    opened = Decoder(lambda *sizes: decoder.capture(Bucket(*sizes)), decoder.submit, decoder.collect)
    measured = measure(opened, batches, seconds)
    device = [decoder.collect(decoder.submit(batch)).timings["device"] for batch in (*batches, *batches, *batches)]
    return {"ms": measured.latency_ms_p50, "device_ms": 1e3 * float(np.median(device))}


def compare(hopper: Mapping[str, float], stitched: Mapping[str, float], segments_ms: float) -> Row:
    """Overhead, and the time that the segments would have to take for none; device times."""
    between = stitched["device_ms"] - segments_ms
    row: dict[str, Any] = {
        "hopper_ms": hopper["ms"],
        "stitched_ms": stitched["ms"],
        "hopper_device_ms": hopper["device_ms"],
        "stitched_device_ms": stitched["device_ms"],
        "segments_ms": segments_ms,
        "between_ms": between,
        "overhead": stitched["device_ms"] / hopper["device_ms"] - 1,
        "segments_ms_to_be_level": hopper["device_ms"] - between,
    }
    return {key: round(value, 3) for key, value in row.items()}


def rows(setting: Setting, seconds: float) -> list[Row]:
    """Both engines at every batch size, one engine after the other, so that each has the memory for itself."""
    hopper, dispatch = open_hopper(setting)
    shapes = [Bucket(batch, setting.beam, setting.context) for batch in setting.batches]
    alone = {}
    for bucket in shapes:
        hopper.capture(bucket)
        batches = random_batches(setting.config, bucket.batch, bucket.beam, bucket.context)
        alone[bucket] = time_decoder(hopper, batches, seconds)
        print(f"{setting.precision} {bucket}: hopper {alone[bucket]}", flush=True)
    del hopper
    gc.collect()
    torch.cuda.empty_cache()
    found = []
    with tempfile.TemporaryDirectory() as directory:
        stitched = open_stitched(setting, dispatch, Path(directory))
        for bucket in shapes:
            stitched.capture(bucket)
            batches = random_batches(setting.config, bucket.batch, bucket.beam, bucket.context)
            times = time_decoder(stitched, batches, seconds)
            row = compare(alone[bucket], times, time_segments(stitched, bucket))
            print(f"{setting.precision} {bucket}: {row}", flush=True)
            found.append({"precision": setting.precision, "segments": "torch", **bucket.__dict__, **row})
    return found


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="onerec-v2-4b-a0.5b")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beam", type=positive, default=512)
    parser.add_argument("--context", type=positive, default=3000)
    parser.add_argument("--seconds", type=duration, default=0.5, help="of measuring a row, in each of two ways")
    parser.add_argument("--commit", help="of the measured tree, where git is not at hand")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise LokaError("both engines are timed on a CUDA device, and none is here")
    device = torch.device("cuda", torch.cuda.current_device())
    result = ResultFile(arguments.out, {"environment": describe_environment(arguments.commit)})
    for precision in PRECISIONS:
        batches = tuple(sorted(set(arguments.batches)))
        config = PRESETS[arguments.preset]
        setting = Setting(config, precision, batches, arguments.beam, arguments.context, device)
        for row in rows(setting, arguments.seconds):
            result.add({"preset": arguments.preset, **row})


if __name__ == "__main__":
    run_command_line(main)
