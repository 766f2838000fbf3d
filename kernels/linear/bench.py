"""Dense linears of the 4B-A0.5B preset: the fastest implementation beside torch's, and a sweep of all of them.

python -m loka_serve.kernels.linear.bench [--part 0/4] [--compile-only] [--recipes fp8_row] [--rows 8 64] [--float32]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..benchmarking import KernelRow, make_row
from .implementations import RECIPES, implementations_for, linear, weight_scale_for
from .workload import Timing, make_operands, time_implementations

# (N, K) of the cross-attention's projections, q k v, a dense block's gate and up, its down projection, the head.
SHAPES = ((1408, 1408), (4224, 1408), (7680, 1408), (1408, 3840), (8192, 1408))
ROWS = (1, 8, 64, 512, 4096, 16384)


def rows(row_counts: Sequence[int] = ROWS) -> Iterator[KernelRow]:
    """Every shape, row count and recipe: against torch at the same recipe, and against the fastest BF16."""
    for n, k in SHAPES:
        for count in row_counts:
            bf16: Timing | None = None
            for recipe in RECIPES:
                names = implementations_for(recipe, count, n, k, "cuda")
                timings = list(time_implementations(names, recipe, count, n, k, "cuda"))
                if not timings:
                    continue
                best = min(timings, key=lambda timing: timing.us)
                beside = [("torch", timing.us) for timing in timings if timing.implementation == "torch"]
                if recipe == "bf16":
                    bf16 = best
                elif bf16 is not None:
                    beside.append((f"BF16, {bf16.implementation}", bf16.us))
                size = 2 if recipe == "bf16" else 1
                traffic = (count + n) * k * size + count * n * 2
                for baseline in beside:
                    shape = f"{count} x {n} x {k}, {recipe}, {best.implementation}"
                    yield make_row("linear", shape, best.us, 2 * count * n * k, traffic, baseline, best.error)


def sweep(
    recipes: Sequence[str] = RECIPES,
    row_counts: Sequence[int] = ROWS,
    out_dtype: torch.dtype = torch.bfloat16,
    part: tuple[int, int] = (0, 1),
    compile_only: bool = False,
) -> Iterator[dict[str, Any]]:
    """Every implementation at every shape, as a record to print.

    Args:
        part: (i, n): every n-th combination from the i-th, so that n processes share the work.
        compile_only: run each once untimed, which fills the compilers' caches.
    """
    # Parts differ by implementation first: a Triton kernel is compiled for a tiling and a recipe, not for a shape.
    work = [
        (name, recipe, count, n, k)
        for recipe in recipes
        for count in row_counts
        for n, k in SHAPES
        for name in implementations_for(recipe, count, n, k, "cuda", out_dtype)
    ]
    kinds = sorted({(name, recipe) for name, recipe, *_ in work})
    mine = set(kinds[part[0] :: part[1]])
    for recipe in recipes:
        for count in row_counts:
            for n, k in SHAPES:
                here = (recipe, count, n, k)
                names = [item[0] for item in work if item[1:] == here and (item[0], recipe) in mine]
                if names:
                    yield from _sweep_shape(names, *here, out_dtype=out_dtype, compile_only=compile_only)


def _sweep_shape(
    names: list[str], recipe: str, count: int, n: int, k: int, out_dtype: torch.dtype, compile_only: bool
) -> Iterator[dict[str, Any]]:
    where = {"recipe": recipe, "rows": count, "n": n, "k": k, "out_dtype": str(out_dtype).removeprefix("torch.")}
    if compile_only:
        x, scale, weight, weight_scale = make_operands(recipe, count, n, k, "cuda")
        for name in names:
            record: dict[str, Any] = {**where, "implementation": name}
            try:
                linear(x, scale, weight, weight_scale_for(name, weight_scale), name, out_dtype)
            except Exception as error:  # of any library or compiler; the sweep goes on
                record["failed"] = str(error)[:200]
            yield record
        return
    for timing in time_implementations(names, recipe, count, n, k, "cuda", out_dtype, repeats=11):
        tflops = round(2 * count * n * k / timing.us / 1e6, 1)
        record = {"implementation": timing.implementation, "us": round(timing.us, 2), "tflops": tflops}
        yield {**where, **record, "error": float(f"{timing.error:.2g}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="i/n: the i-th of n parts of the implementations")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--float32", action="store_true", help="float32 outputs")
    arguments = parser.parse_args()
    index, _, parts = arguments.part.partition("/")
    out_dtype = torch.float32 if arguments.float32 else torch.bfloat16
    part = int(index), int(parts or 1)
    for record in sweep(arguments.recipes, arguments.rows, out_dtype, part, arguments.compile_only):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
