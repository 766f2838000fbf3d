"""Times every kernel beside the libraries that do the same, and writes one JSON file.

python -m benchmarks.kernels --out benchmarks/results/h200/kernels.json [--only radix_topk ...] [--commit HASH]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import time
from pathlib import Path

import torch

from benchmarks.environment import describe_environment

OPERATIONS = (
    "radix_topk",
    "beam_attention",
    "self_attention",
    "norm_quantize",
    "quantize",
    "swiglu_quantize",
    "embed_context",
    "rotary",
    "moe",
)


def copy_bandwidth() -> float:
    """GB/s of one pass over 1 GiB, bytes read plus bytes written: the ceiling of memory-bound kernels.

    An arithmetic kernel, since a captured memory copy runs on the slower copy engine.
    """
    from loka_serve.kernels.benchmarking import time_us

    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_us(lambda: torch.mul(source, 1.0, out=target), [()] * 2) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--commit", help="what the result says it was measured at; by default git is asked")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: the kernels are timed on a CUDA device, and none is here")
    ceiling = copy_bandwidth()
    print(f"device copy {ceiling:.0f} GB/s")
    rows = []
    for operation in arguments.only:
        start = time.monotonic()
        for row in importlib.import_module(f"loka_serve.kernels.{operation}.bench").rows():
            rows.append(dataclasses.asdict(row))
            print(
                f"{row.op:16} {row.shape:44} {row.us:9.1f} us {row.tflops:7.1f} TFLOP/s {row.gb_per_s:7.0f} GB/s"
                f"  {row.ratio:6.2f}x {row.baseline} ({row.baseline_us:.1f} us)  error {row.max_error:.2g}",
                flush=True,
            )
        print(f"{operation}: {time.monotonic() - start:.0f} s", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": describe_environment(arguments.commit), "copy_gb_per_s": round(ceiling, 1), "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
