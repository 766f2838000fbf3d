"""How far the hopper engine agrees with the reference engine at the same recipes, and with itself in other company.

python -m benchmarks.agreement --bundle BUNDLE [BUNDLE ...] --histories FILE --out FILE [--rows 512] [--beam 64]

The oracle runs the bundle's recipes with float32 activations; `reference_bf16` is the same with bfloat16 ones, which
shows what the format alone does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.environment import describe_environment
from loka_serve.bundle import Bundle
from loka_serve.catalog.histories import read_histories
from loka_serve.command_line import CommandParser, existing_file, output_file, positive, run_command_line
from loka_serve.engines.base import BeamResult, Engine, EngineLimits, EngineRequest, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.errors import LokaError
from loka_serve.probe.histories import to_request

TOP_K = 50
Ranked = list[tuple[list[int], np.ndarray]]
"""(leaves, scores) of each request, best first."""


def run(engine: Engine, requests: Sequence[EngineRequest], batch: int) -> Ranked:
    """All requests in batches of at most `batch`."""
    ranked: Ranked = []
    for start in range(0, len(requests), batch):
        ranked += rows(engine.recommend(RequestBatch(tuple(requests[start : start + batch]))))
    return ranked


def rows(result: BeamResult) -> Ranked:
    if result.failed.any():
        raise LokaError("a score is not a number")
    return [
        (result.leaves[row, :count].tolist(), result.scores[row, :count])
        for row, count in enumerate(result.counts.tolist())
    ]


def compare(found: Ranked, expected: Ranked) -> dict[str, Any]:
    """Overlap of the first `TOP_K`, first places, and differences of the scores of common leaves.

    `top_1_beyond_error` leaves out requests whose expected first two are closer than twice the RMS difference.
    """
    overlaps, differences, same, margins = [], [], [], []
    for (leaves, scores), (others, wanted) in zip(found, expected, strict=True):
        overlaps.append(len(set(leaves[:TOP_K]) & set(others[:TOP_K])) / max(len(others[:TOP_K]), 1))
        known = dict(zip(others, wanted.tolist(), strict=True))
        differences += [
            score - known[leaf] for leaf, score in zip(leaves, scores.tolist(), strict=True) if leaf in known
        ]
        same.append(leaves[:1] == others[:1])
        margins.append(float(wanted[0] - wanted[1]) if len(wanted) > 1 else float("inf"))
    rms = float(np.sqrt(np.mean(np.square(differences))))
    clear = np.array(margins) > 2 * rms
    return {
        "requests": len(found),
        "top_50_overlap": round(float(np.mean(overlaps)), 4),
        "top_1_equal": round(float(np.mean(same)), 4),
        "top_1_beyond_error": round(float(np.mean(np.array(same)[clear])), 4) if clear.any() else None,
        "requests_beyond_error": int(clear.sum()),
        "score_rms_difference": rms,
        "score_largest_difference": float(np.max(np.abs(differences))),
    }


def measure(bundle: Bundle, histories: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All comparisons, on the current CUDA device."""
    from loka_serve.engines.hopper.engine import HopperEngine
    from loka_serve.engines.hopper.options import HopperOptions

    config = bundle.config
    limits = EngineLimits(arguments.batch, arguments.beam, config.max_context, config.levels)
    requests = []
    for history in read_histories(histories, bundle.catalog):
        requests.append(to_request(history, bundle.catalog, config, arguments.beam))
        if len(requests) == arguments.rows:
            break
    device = torch.device("cuda", torch.cuda.current_device())
    options = HopperOptions(
        batches=tuple(sorted({1, arguments.batch})), context_precision=arguments.context_precision, tune=arguments.tune
    )
    hopper = HopperEngine(bundle, limits, device, options)
    hopper.warmup()
    ours = run(hopper, requests, arguments.batch)
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = run(hopper, [requests[index] for index in order], arguments.batch)
    reordered = [shuffled[place] for place in np.argsort(order)]
    alone = run(hopper, requests[: arguments.alone], 1)
    again = run(hopper, requests, arguments.batch)
    oracle = ReferenceEngine(bundle.load_model(device, cache_weight=True), bundle.catalog, limits, device)
    expected = run(oracle, requests, arguments.batch)
    del oracle
    half = ReferenceEngine(bundle.load_model(device, torch.bfloat16), bundle.catalog, limits, device)
    return {
        "hopper_against_reference": compare(ours, expected),
        "reference_bf16_against_reference": compare(run(half, requests, arguments.batch), expected),
        "hopper_again": compare(again, ours),
        "hopper_in_another_order": compare(reordered, ours),
        "hopper_alone": compare(alone, ours[: arguments.alone]),
    }


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True, nargs="+")
    parser.add_argument("--histories", type=existing_file, required=True)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--rows", type=positive, default=512)
    parser.add_argument("--alone", type=positive, default=128, help="requests that are also run one by one")
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--beam", type=positive, default=64)
    parser.add_argument("--context-precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--tune", action="store_true", help="measure which library runs each linear; takes a minute")
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise LokaError("the hopper engine runs on a CUDA device, and none is here")
    bundles = {path: Bundle.load(path) for path in arguments.bundle}  # all of them before the first is measured
    results = {}
    for path, bundle in bundles.items():
        recipes = sorted(set(bundle.plan.recipes.values()))
        results[path.name] = {"recipes": recipes, **measure(bundle, arguments.histories, arguments)}
        print(json.dumps({path.name: results[path.name]}, indent=1), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": describe_environment(arguments.commit), "top_k": TOP_K, "bundles": results}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_command_line(main)
