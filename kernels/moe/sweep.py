"""Every candidate for the two grouped GEMMs of the 4B-A0.5B preset, for the tables in `configurations.py`.

python -m loka_serve.kernels.moe.sweep [--part 0/4] [--compile-only] [--recipes fp8_block] [--tokens 8 64]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ..benchmarking import dequantized, relative_error, time_us
from .configurations import Configuration
from .cuda import WarpSpecialized
from .experts import Implementation, Tiling
from .libraries import DeepGemm, deep_gemm_takes, with_groups
from .reference import ExpertWeights
from .sorted_rows import gather_rows, sorted_swiglu
from .workload import D_MODEL, EXPERTS, SLOTS, WIDTH, Batch, make_batches, make_weights, run_down, run_gate_up

TOKENS = (4096, 16384, 512, 64, 8, 1)
RECIPES = ("fp8_block", "bf16")
# Persistent, yet so many programs that each computes one tile. FP8's first GEMM by descriptors spills registers in any
# other form; BF16's loses the overlap of its products in this one.
EACH = 64

# Makes the batches that all candidates of as many rows a block are timed with.
BASE = {16: Tiling(16, 4, 3), 64: Tiling(64, 4, 2), 128: Tiling(128, 8, 3)}
SPECIALIZED = (WarpSpecialized(), WarpSpecialized(group_m=4), WarpSpecialized(group_m=16))
LIBRARY = (DeepGemm(ends=True), DeepGemm(ends=False))
GATE_UP: dict[int, tuple[Tiling, ...]] = {
    16: (
        Tiling(16, 4, 3),
        Tiling(16, 4, 5),
        Tiling(16, 4, 4, described=True),
        Tiling(16, 8, 4, described=True),
    ),
    64: (
        Tiling(64, 4, 2),
        Tiling(64, 8, 4),
        Tiling(64, 8, 4, described=True),
        Tiling(64, 8, 4, described=True, ordered=True),
    ),
    128: (
        Tiling(128, 8, 3),
        Tiling(128, 8, 4),
        Tiling(128, 8, 3, group_m=4),
        Tiling(128, 8, 3, group_m=16),
    ),
}
FP8_GATE_UP: dict[int, tuple[Tiling, ...]] = {
    64: (
        Tiling(64, 8, 4, persistent=1),
        Tiling(64, 8, 5, persistent=1),
        Tiling(64, 8, 4, described=True, persistent=1),
        Tiling(64, 8, 4, described=True, persistent=1, ordered=True),
    ),
    128: (
        Tiling(128, 8, 3, described=True, persistent=1),
        Tiling(128, 8, 3, described=True, persistent=EACH),
        Tiling(128, 8, 4, described=True, persistent=EACH),
        Tiling(128, 8, 3, described=True, persistent=1, ordered=True),
        Tiling(128, 8, 3, described=True, persistent=EACH, ordered=True),
        Tiling(128, 8, 3, described=True, persistent=EACH, ordered=True, group_m=16),
    ),
}
BF16_GATE_UP: dict[int, tuple[Tiling, ...]] = {
    128: (
        Tiling(128, 8, 3, described=True),
        Tiling(128, 8, 4, described=True),
        Tiling(128, 8, 4, described=True, ordered=True),
        Tiling(128, 8, 4, described=True, ordered=True, group_m=16),
    ),
}
DOWN: dict[int, tuple[Tiling, ...]] = {
    16: (
        Tiling(16, 4, 3),
        Tiling(16, 4, 5),
        Tiling(16, 4, 5, described=True),
        Tiling(16, 4, 4, described=True, paired=True),
    ),
    64: (
        Tiling(64, 4, 3),
        Tiling(64, 4, 4),
        Tiling(64, 4, 3, described=True),
        Tiling(64, 4, 4, described=True),
        Tiling(64, 8, 4, described=True, wide=True),
    ),
    128: (
        Tiling(128, 8, 3),
        Tiling(128, 8, 4),
        Tiling(128, 8, 3, persistent=1),
        Tiling(128, 8, 4, paired=True),
        Tiling(128, 8, 3, described=True),
        Tiling(128, 8, 4, described=True),
        Tiling(128, 8, 4, described=True, group_m=16),
        Tiling(128, 8, 4, described=True, persistent=1),
        Tiling(128, 8, 3, described=True, paired=True),
    ),
}
FP8_DOWN: dict[int, tuple[Tiling, ...]] = {
    64: (Tiling(64, 8, 4, paired=True, persistent=1), Tiling(64, 8, 4, described=True, paired=True, persistent=1)),
}
BF16_DOWN: dict[int, tuple[Tiling, ...]] = {
    128: (Tiling(128, 8, 3, wide=True), Tiling(128, 8, 4, described=True, wide=True)),  # FP8's two sums do not fit
}
OWN = {
    ("gate_up", "fp8_block"): (GATE_UP, FP8_GATE_UP),
    ("gate_up", "bf16"): (GATE_UP, BF16_GATE_UP),
    ("down", "fp8_block"): (DOWN, FP8_DOWN),
    ("down", "bf16"): (DOWN, BF16_DOWN),
}
# Beside the library, where blocks of 128 rows are too large for a program of ours.
FEW = {"gate_up": (Tiling(128, 8, 3),), "down": (Tiling(128, 8, 3), Tiling(128, 8, 4, described=True))}


def candidates(op: str, recipe: str, tokens: int, block_m: int) -> tuple[Implementation, ...]:
    """What to try for `gate_up` or `down` at so many tokens in blocks of so many rows."""
    if (block_m == 16 and tokens > 64) or (block_m == 64 and tokens > 4096):
        return ()
    if block_m == 128 and tokens < 512:
        return FEW[op] + LIBRARY
    own: tuple[Implementation, ...] = tuple(tiling for table in OWN[op, recipe] for tiling in table.get(block_m, ()))
    if block_m == 128 and recipe == "fp8_block":
        own += SPECIALIZED
    return own + (LIBRARY if block_m == 128 else ())


def sweep(
    recipes: Sequence[str] = RECIPES,
    tokens: Sequence[int] = TOKENS,
    part: tuple[int, int] = (0, 1),
    compile_only: bool = False,
) -> Iterator[dict[str, Any]]:
    """Every candidate of both GEMMs, as a record to print; `error` is against the first Triton tiling's result.

    Args:
        part: (i, n): every n-th candidate from the i-th, so that n processes share the work.
        compile_only: run each once untimed, which fills the compilers' caches.
    """
    kinds = dict.fromkeys(
        (recipe, op, use)
        for recipe in recipes
        for op in ("gate_up", "down")
        for count in tokens
        for block_m in BASE
        for use in candidates(op, recipe, count, block_m)
    )
    mine = set(list(kinds)[part[0] :: part[1]])
    compiled: set[tuple[str, str, Implementation]] = set()
    for recipe in recipes:
        weights = make_weights(recipe == "fp8_block")
        for count in sorted(tokens) if compile_only else tokens:
            for block_m, base in BASE.items():
                here = [
                    (op, use)
                    for op in ("gate_up", "down")
                    for use in candidates(op, recipe, count, block_m)
                    if (recipe, op, use) in mine and (recipe, op, use) not in compiled
                ]
                if not here:
                    continue
                if compile_only:  # Triton compiles once for all sizes; the library chooses its tiles by size
                    compiled.update((recipe, op, use) for op, use in here if isinstance(use, Tiling))
                batches = make_batches(count, weights, Configuration(base, base))
                yield from _sweep_block(here, recipe, count, weights, batches, compile_only)


def _sweep_block(
    work: list[tuple[str, Implementation]],
    recipe: str,
    tokens: int,
    weights: ExpertWeights,
    batches: list[tuple[Batch]],
    compile_only: bool,
) -> Iterator[dict[str, Any]]:
    takes = deep_gemm_takes(weights.gate_up_scale, weights.gate_up)
    grouped = {
        use: [(replace(batch, rows=with_groups(batch.rows, EXPERTS, use)),) for (batch,) in batches]
        for use in LIBRARY
        if takes and any(use == other for _, other in work)
    }
    for op, use in work:
        record: dict[str, Any] = {"op": f"moe_{op}", "recipe": recipe, "tokens": tokens, "implementation": name(use)}
        if isinstance(use, DeepGemm) and not takes:
            yield {**record, "failed": "deep_gemm is not here, or does not take these operands"}
            continue
        inputs = grouped[use] if isinstance(use, DeepGemm) else batches
        call = _call(op, weights, use)
        try:
            record["error"] = float(f"{_error(op, call, inputs[0][0]):.2g}")
            if not compile_only:
                us = time_us(call, inputs, repeats=9)
                flops = 2 * tokens * SLOTS * WIDTH * D_MODEL * (2 if op == "gate_up" else 1)
                record |= {"us": round(us, 2), "tflops": round(flops / us / 1e6, 1)}
        except Exception as error:  # of any library or compiler, or too large for the device; the sweep goes on
            record["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        yield record
    if grouped and not compile_only:
        yield from _parts(recipe, tokens, weights, batches, next(iter(grouped)))


def _parts(
    recipe: str, tokens: int, weights: ExpertWeights, batches: list[tuple[Batch]], use: DeepGemm
) -> Iterator[dict[str, Any]]:
    """What the library needs beside its GEMMs: order and activation are within `gate_up`'s time, the groups are not."""
    gate_up = torch.randn(len(batches[0][0].rows.tokens), 2 * WIDTH, device="cuda").bfloat16()
    quantize = weights.down_scale is not None
    calls: dict[str, Callable[[Batch], object]] = {
        "moe_gather": lambda batch: gather_rows(batch.x, batch.scale, batch.rows),
        "moe_sorted_swiglu": lambda batch: sorted_swiglu(gate_up, batch.rows, quantize),
        "moe_groups": lambda batch: with_groups(batch.rows, EXPERTS, use),
    }
    for op, call in calls.items():
        us = round(time_us(call, batches, repeats=9), 2)
        yield {"op": op, "recipe": recipe, "tokens": tokens, "implementation": name(use), "us": us}


def name(use: Implementation) -> str:
    """The implementation as one writes it, without what has its default value."""
    fields = type(use).__dataclass_fields__
    changed = {key: value for key, value in asdict(use).items() if value != fields[key].default}
    return f"{type(use).__name__}({', '.join(f'{key}={value}' for key, value in changed.items())})"


def _call(op: str, weights: ExpertWeights, use: Implementation) -> Callable[[Batch], Any]:
    if op == "gate_up":
        return lambda batch: run_gate_up(batch.x, batch.scale, weights, batch.rows, use)
    return lambda batch: run_down(batch.hidden, batch.hidden_scale, weights, batch.rows, use)


def _error(op: str, call: Callable[[Batch], Any], batch: Batch) -> float:
    """Of the result for one batch: how far it is from what the batch carries."""
    rows = batch.rows
    needed = (rows.expert_of_block >= 0).repeat_interleave(rows.block_m)
    used = needed & (rows.tokens >= 0)

    def values(result: tuple[Tensor, Tensor | None]) -> Tensor:
        hidden, scale = result
        return (hidden.float() if scale is None else dequantized(hidden, scale))[used]

    if op == "gate_up":
        return relative_error(values(call(batch)), values((batch.hidden, batch.hidden_scale)))
    return relative_error(call(batch)[used], batch.outputs[used])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="i/n: the i-th of n parts of the candidates")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    arguments = parser.parse_args()
    index, _, parts = arguments.part.partition("/")
    part = int(index), int(parts or 1)
    for record in sweep(arguments.recipes, arguments.tokens, part, arguments.compile_only):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
