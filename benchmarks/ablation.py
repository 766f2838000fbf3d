"""The table of the OneRec-V2 quantization paper (arXiv 2603.11486) on our stack: what each stage of work gains.

python -m benchmarks.ablation --out benchmarks/results/h200/ablation.json [--yardstick SCRIPT]

Batch 8, beam 512, context 3000, unconstrained. Each row adds to the one above:

    baseline         BF16 in eager PyTorch: the yardstick's time, or without one our engine with library operations
    infrastructure   our engine in BF16: CUDA graphs, two batches in flight, our attention and MoE kernels
    fp8              FP8 recipes; each quantization a kernel of its own, torch.topk
    operators        quantization fused into norms, SwiGLU and permutation; radix top-k

A gain is in points: percent of the baseline's throughput, as in the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from benchmarks.decoders import OpenDecoder, Options, open_decoder
from benchmarks.engine import PRESET, release_memory
from benchmarks.environment import describe_environment
from benchmarks.measure import ONE_AFTER_ANOTHER, Measurement, measure, random_batches
from benchmarks.power import PowerMeter, open_power_meter
from benchmarks.results import ResultFile, Row
from benchmarks.yardstick import Shape, YardstickTimes, run_yardstick
from loka_serve.command_line import CommandParser, duration, existing_file, output_file, run_command_line
from loka_serve.errors import LokaError
from loka_serve.models.config import PRESETS, OneRecV2Config

SHAPE = Shape(batch=8, beam=512, context=3000)
PAPER_BASELINE_REQ_PER_S = 205.0


@dataclass(frozen=True)
class Step:
    """A row of the table: the engine's options, and what the paper reports where it does."""

    name: str
    options: Options
    paper_gain_points: float = 0.0
    paper_latency_ms: float | None = None


def table_steps(context_precision: str) -> tuple[Step, ...]:
    """`context_precision` is that of the whole engine, in the last row."""
    libraries: Options = {"top_k": "torch", "fused": False, "context_precision": "bf16"}
    whole: Options = {"top_k": "radix", "fused": True, "context_precision": context_precision}
    return (
        Step("baseline", {"precision": "bf16", "graphs": False, **libraries}, paper_latency_ms=139.0),
        Step("infrastructure", {"precision": "bf16", "graphs": True, **libraries}, 27.0),
        Step("fp8", {"precision": "fp8", "graphs": True, **libraries}, 42.0),
        Step("operators", {"precision": "fp8", "graphs": True, **whole}, 23.0, paper_latency_ms=70.0),
    )


@dataclass(frozen=True)
class Ablation:
    """What all rows are measured with."""

    config: OneRecV2Config
    device: torch.device
    yardstick: Mapping[Shape, YardstickTimes]
    seconds: float
    meter: PowerMeter | None = None
    context_precision: str = "bf16"
    shape: Shape = SHAPE
    open_decoder: OpenDecoder = open_decoder

    def rows(self) -> Iterator[Row]:
        baseline = previous = paper_req_per_s = 0.0
        eager_ms = self.yardstick.get(self.shape, YardstickTimes()).eager_ms
        for step in table_steps(self.context_precision):
            if step.name == "baseline" and eager_ms is not None:
                measured = of_yardstick(eager_ms, self.shape)
            else:
                measured = {"source": "hopper", "options": step.options, **dataclasses.asdict(self._measure(step))}
            req_per_s: float = measured["req_per_s"]
            baseline = baseline or req_per_s
            paper_req_per_s += PAPER_BASELINE_REQ_PER_S * (step.paper_gain_points / 100 if paper_req_per_s else 1)
            gain = 100 * (req_per_s - previous) / baseline if previous else 0.0
            previous = req_per_s
            yield {
                "step": step.name,
                **self.shape._asdict(),
                **measured,
                "gain_points": round(gain, 1),
                "speedup": round(req_per_s / baseline, 3),
                "paper_req_per_s": round(paper_req_per_s, 1),
                "paper_latency_ms": step.paper_latency_ms,
                "paper_gain_points": step.paper_gain_points,
            }

    def _measure(self, step: Step) -> Measurement:
        decoder = self.open_decoder(self.config, None, [self.shape], self.device, step.options)
        decoder.capture(*self.shape)
        measured = measure(decoder, random_batches(self.config, *self.shape), self.seconds, self.meter)
        del decoder
        release_memory()
        return measured


def of_yardstick(eager_ms: float, shape: Shape) -> Row:
    """The same columns; the yardstick tells a median of calls one after another, and nothing else."""
    return {
        "source": "yardstick, eager",
        "options": {},
        **dict.fromkeys(field.name for field in dataclasses.fields(Measurement)),
        "latency_ms_p50": eager_ms,
        "req_per_s": round(shape.batch / eager_ms * 1e3, 1),
        "req_per_s_mode": ONE_AFTER_ANOTHER,
    }


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--yardstick", type=existing_file, help="script whose eager time is the baseline")
    parser.add_argument("--context-precision", choices=("bf16", "fp8"), default="bf16", help="of the last row")
    parser.add_argument("--seconds", type=duration, default=2.0, help="of measuring a row, in each of two ways")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise LokaError("the Hopper engine is timed on a CUDA device, and none is here")
    yardstick = run_yardstick(arguments.yardstick)
    device = torch.device("cuda", torch.cuda.current_device())
    ablation = Ablation(
        config=PRESETS[PRESET],
        device=device,
        yardstick=yardstick,
        seconds=arguments.seconds,
        meter=open_power_meter(),
        context_precision=arguments.context_precision,
    )
    shared = {
        "environment": describe_environment(),
        "preset": PRESET,
        "yardstick": [{**shape._asdict(), **times._asdict()} for shape, times in yardstick.items()],
    }
    result = ResultFile(arguments.out, shared)
    for row in ablation.rows():
        result.add(row)
        print(
            f"{row['step']:16} {row['latency_ms_p50']:8.2f} ms {row['req_per_s']:8.1f} req/s"
            f"  {row['gain_points']:+7.1f} points (paper {row['paper_gain_points']:+.0f})",
            flush=True,
        )


if __name__ == "__main__":
    run_command_line(main)
