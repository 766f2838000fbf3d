"""Times every kernel beside the libraries that do the same, and writes one JSON file.

python -m benchmarks.kernels --out benchmarks/results/h200/kernels.json [--only radix_topk ...] [--commit HASH]
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
import traceback
from typing import Any

import torch

from benchmarks.environment import describe_environment
from loka_serve.command_line import CommandParser, output_file, run_command_line
from loka_serve.errors import LokaError
from loka_serve.kernels.benchmarking import KernelRow, time_us

BENCHES = {
    "radix_topk": "radix_topk.bench",
    "beam_attention": "beam_attention.bench",
    "moe": "moe.bench",
    "moe_routing": "moe.bench_routing",
    "norm_quantize": "norm_quantize.bench",
    "level_head": "level_head.bench",
    "self_attention": "self_attention.bench",
    "swiglu_quantize": "swiglu_quantize.bench",
    "quantize": "quantize.bench",
    "embed_context": "embed_context.bench",
    "rotary": "rotary.bench",
    "linear": "linear.bench",
}


def copy_bandwidth() -> float:
    """GB/s of one pass over 1 GiB, bytes read plus bytes written: the ceiling of memory-bound kernels.

    An arithmetic kernel, since a captured memory copy runs on the slower copy engine.
    """
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_us(lambda: torch.mul(source, 1.0, out=target), [()] * 2) / 1e3


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--commit", help="what the result says it was measured at; by default git is asked")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise LokaError("the kernels are timed on a CUDA device, and none is here")
    ceiling = copy_bandwidth()
    print(f"device copy {ceiling:.0f} GB/s")
    environment = describe_environment(arguments.commit)
    rows: list[dict[str, Any]] = []
    failed = []
    for operation in arguments.only:
        start = time.monotonic()
        try:
            for row in importlib.import_module(f"loka_serve.kernels.{BENCHES[operation]}").rows():
                rows.append(dataclasses.asdict(row))
                print(describe(row), flush=True)
        except Exception:  # one operation's trouble costs its own rows alone
            traceback.print_exc()
            failed.append(operation)
        print(f"{operation}: {time.monotonic() - start:.0f} s", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"environment": environment, "copy_gb_per_s": round(ceiling, 1), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        raise SystemExit(f"error: {', '.join(failed)}: see above")


def describe(row: KernelRow) -> str:
    """One line for the terminal."""
    return (
        f"{row.op:16} {row.shape:44} {row.us:9.1f} us {row.tflops:7.1f} TFLOP/s {row.gb_per_s:7.0f} GB/s"
        f"  {row.ratio:6.2f}x {row.baseline} ({row.baseline_us:.1f} us)  error {row.max_error:.2g}"
    )


if __name__ == "__main__":
    run_command_line(main)
