"""How far the hopper engine agrees with the reference engine at the same recipes, and with itself in other company.

python -m benchmarks.agreement --out FILE [--bundle BUNDLE ... --histories FILE] [--preset NAME] [--rows 512]

The oracle runs the recipes with float32 activations; `reference_bf16` is the same with bfloat16 ones, which shows what
the format alone does. Logits are compared level by level for the beams that the hopper engine extended.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.environment import describe_environment
from benchmarks.logits import compare_logits, logits_of
from benchmarks.results import ResultFile
from benchmarks.subjects import Subject, of_bundle, of_preset
from loka_serve.bundle import Bundle
from loka_serve.command_line import CommandParser, existing_file, output_file, positive, run_command_line
from loka_serve.engines.base import BeamResult, EngineRequest, RequestBatch
from loka_serve.engines.hopper.decoder import HopperDecoder
from loka_serve.engines.hopper.options import CONTEXT_PRECISIONS, HopperOptions
from loka_serve.errors import LokaError
from loka_serve.models.config import PRESETS

Recommend = Callable[[RequestBatch], BeamResult]
TOP_K = 50
PRESET_BATCH, PRESET_BEAM = 8, 512
Ranked = list[tuple[list[int], np.ndarray]]
"""(leaves, scores) of each request, best first."""


def run(recommend: Recommend, requests: Sequence[EngineRequest], batch: int) -> Ranked:
    """All requests in batches of at most `batch`."""
    ranked: Ranked = []
    for start in range(0, len(requests), batch):
        ranked += rows(recommend(RequestBatch(tuple(requests[start : start + batch]))))
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
    overlaps, differences, same, margins, identical = [], [], [], [], []
    for (leaves, scores), (others, wanted) in zip(found, expected, strict=True):
        overlaps.append(len(set(leaves[:TOP_K]) & set(others[:TOP_K])) / max(len(others[:TOP_K]), 1))
        known = dict(zip(others, wanted.tolist(), strict=True))
        differences += [
            score - known[leaf] for leaf, score in zip(leaves, scores.tolist(), strict=True) if leaf in known
        ]
        same.append(leaves[:1] == others[:1])
        identical.append(leaves == others and np.array_equal(scores, wanted))
        margins.append(float(wanted[0] - wanted[1]) if len(wanted) > 1 else float("inf"))
    rms = float(np.sqrt(np.mean(np.square(differences))))
    clear = np.array(margins) > 2 * rms
    return {
        "requests": len(found),
        "bitwise_equal": round(float(np.mean(identical)), 4),
        "top_50_overlap": round(float(np.mean(overlaps)), 4),
        "top_1_equal": round(float(np.mean(same)), 4),
        "top_1_beyond_error": round(float(np.mean(np.array(same)[clear])), 4) if clear.any() else None,
        "requests_beyond_error": int(clear.sum()),
        "score_rms_difference": rms,
        "score_largest_difference": float(np.max(np.abs(differences))),
    }


def measure(subject: Subject, options: HopperOptions, overlaps: bool) -> dict[str, Any]:
    """All comparisons, on the current CUDA device; `overlaps` of answers mean nothing on random weights."""
    batch, requests = subject.batch, subject.requests
    first = RequestBatch(tuple(requests[:batch]))
    decoder = subject.decoder(options)
    result: dict[str, Any] = {"recipes": subject.recipes, "hopper_with_itself": with_itself(subject, decoder)}
    ours, traces = run(decoder_runs(decoder), requests, batch), decoder.trace(first)
    del decoder
    result["batch_invariant_with_itself"] = with_itself(
        subject, subject.decoder(replace(options, batch_invariant=True))
    )
    release_memory()
    oracle = subject.reference(torch.float32)
    expected, counts = logits_of(oracle, first, traces), [trace.counts for trace in traces]
    answers = run(oracle.recommend, requests, batch) if overlaps else []
    del oracle
    release_memory()
    half = subject.reference(torch.bfloat16)
    result["logits"] = {
        "hopper_against_reference": compare_logits([trace.logits for trace in traces], expected, counts),
        "reference_bf16_against_reference": compare_logits(logits_of(half, first, traces), expected, counts),
    }
    if overlaps:
        result["hopper_against_reference"] = compare(ours, answers)
        result["reference_bf16_against_reference"] = compare(run(half.recommend, requests, batch), answers)
    return result


def with_itself(subject: Subject, decoder: HopperDecoder) -> dict[str, Any]:
    """A decoder's answers again, in another order and alone, beside those of full batches; and its time a batch."""
    recommend, requests, batch = decoder_runs(decoder), subject.requests, subject.batch
    ours = run(recommend, requests, batch)
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = run(recommend, [requests[index] for index in order], batch)
    full = RequestBatch(tuple(requests[:batch]))
    return {
        "again": compare(run(recommend, requests, batch), ours),
        "in_another_order": compare([shuffled[place] for place in np.argsort(order)], ours),
        "alone": compare(run(recommend, requests[: subject.alone], 1), ours[: subject.alone]),
        "batch_ms": round(1e3 * float(np.median([recommend(full).timings["device"] for _ in range(20)])), 3),
    }


def release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def decoder_runs(decoder: HopperDecoder) -> Recommend:
    return lambda batch: decoder.collect(decoder.submit(batch))


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--bundle", type=Path, nargs="*", default=[])
    parser.add_argument("--histories", type=existing_file, help="of the bundles' users")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="compare on random weights of this preset, too")
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--rows", type=positive, default=512)
    parser.add_argument("--alone", type=positive, default=128, help="requests that are also run one by one")
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--beam", type=positive, default=64)
    parser.add_argument("--context-precision", choices=CONTEXT_PRECISIONS, default="bf16")
    parser.add_argument("--tune", action="store_true", help="measure which library runs each linear; takes a minute")
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    arguments = parser.parse_args()
    if bool(arguments.bundle) != bool(arguments.histories) or not (arguments.bundle or arguments.preset):
        raise LokaError("expected --bundle with --histories, or --preset, or all of them")
    if not torch.cuda.is_available():
        raise LokaError("the hopper engine runs on a CUDA device, and none is here")
    common = HopperOptions(context_precision=arguments.context_precision, tune=arguments.tune)
    options = replace(common, batches=tuple(sorted({1, arguments.batch})))
    bundles = {path: Bundle.load(path) for path in arguments.bundle}  # all of them before the first is measured
    device = torch.device("cuda", torch.cuda.current_device())
    result = ResultFile(arguments.out, {"environment": describe_environment(arguments.commit), "top_k": TOP_K})
    for path, bundle in bundles.items():
        subject = of_bundle(bundle, arguments.histories, device, arguments.rows, arguments.batch, arguments.beam)
        subject = replace(subject, alone=arguments.alone)
        result.add({"name": path.name, **measure(subject, options, overlaps=True)})
    if arguments.preset:
        longest = PRESETS[arguments.preset].max_context
        options = replace(common, batches=(1, PRESET_BATCH), beams=(PRESET_BEAM,), contexts=(longest,))
        for precision in ("bf16", "fp8"):
            subject = of_preset(arguments.preset, precision, device, PRESET_BATCH, PRESET_BEAM)
            result.add({"name": f"{arguments.preset} {precision}", **measure(subject, options, overlaps=False)})


if __name__ == "__main__":
    run_command_line(main)
