"""How far the tensorrt engine's segments on the CPU agree with the reference engine at the same recipes.

python -m benchmarks.stitched_parity --out FILE --bundle BUNDLE ... --histories FILE [--rows 500]

Bundles are built with --engine tensorrt on a CPU. Both engines round where the recipes say and carry float32 between:
what differs is the order of sums, and then the few values that fall to another BF16 or E4M3 number, after which every
later rounding falls anew. A bundle in bf16 is therefore compared without the rounding of inputs as well, as
float32 in both engines. Logits are compared level by level for the beams that the tensorrt engine extended.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.environment import describe_environment
from benchmarks.logits import compare_logits, logits_of
from benchmarks.results import ResultFile
from benchmarks.subjects import requests_of
from loka_serve.bundle import Bundle
from loka_serve.command_line import CommandParser, existing_file, output_file, positive, run_command_line
from loka_serve.engines.base import EngineLimits, EngineRequest, RequestBatch
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.engines.tensorrt.artifacts import Artifacts
from loka_serve.engines.tensorrt.engine import TensorRTEngine
from loka_serve.engines.tensorrt.operations.reference import ReferenceOperations
from loka_serve.engines.tensorrt.runtimes.onnxruntime import OnnxRuntime
from loka_serve.quantization.methods import SiteMethod

TOP_K = 50


def parity(bundle: Bundle, requests: list[EngineRequest], batch: int, rounded: bool = True) -> dict[str, Any]:
    """Logits by level, top-50 sets and scores over all requests.

    Args:
        rounded: inputs of bf16 sites are rounded, as the recipe says; otherwise both engines carry them in float32.
    """
    config = bundle.config
    limits = EngineLimits(batch, max(request.beam_width for request in requests), config.max_context, config.levels)
    stitched = TensorRTEngine(bundle, limits, "cpu")
    reference = ReferenceEngine(bundle.load_model("cpu"), bundle.catalog, limits, "cpu")
    if not rounded:
        leave_inputs_unrounded(stitched, reference)
    errors: list[list[dict[str, Any]]] = []
    equal, overlaps, largest = [], [], 0.0
    for start in range(0, len(requests), batch):
        together = RequestBatch(tuple(requests[start : start + batch]))
        traces = stitched.decoder.trace(together)
        errors.append(
            compare_logits(
                [trace.logits for trace in traces],
                logits_of(reference, together, traces),
                [trace.counts for trace in traces],
            )
        )
        found, expected = stitched.recommend(together), reference.recommend(together)
        for row in range(len(together)):
            ours, theirs = (_top(result.leaves[row], result.scores[row]) for result in (found, expected))
            common = ours.keys() & theirs.keys()
            equal.append(ours.keys() == theirs.keys())
            overlaps.append(len(common) / max(len(theirs), 1))
            largest = max(largest, *(abs(ours[leaf] - theirs[leaf]) for leaf in common), 0.0)
    levels = [[batch_errors[level] for batch_errors in errors] for level in range(config.levels)]
    return {
        "requests": len(requests),
        "beam": limits.beam,
        "logits_relative_rms": [_mean_error(level) for level in levels],
        "top_50_sets_equal": round(float(np.mean(equal)), 4),
        "top_50_overlap": round(float(np.mean(overlaps)), 5),
        "largest_score_difference": round(largest, 6),
    }


def leave_inputs_unrounded(stitched: TensorRTEngine, reference: ReferenceEngine) -> None:
    """Let a bf16 bundle's sites multiply float32 inputs, whose weights are still bfloat16 numbers."""
    for site in reference.model.sites().values():
        assert isinstance(site.method, SiteMethod)
        site.weight = torch.nn.Parameter(site.method.dequantized_weight(), requires_grad=False)
        site.method = None
    assert isinstance(stitched.decoder.operations, ReferenceOperations)
    for layer in stitched.decoder.operations.moe:
        stitched.decoder.operations.moe[layer] = reference.model.layers[layer].get_submodule("moe")
    runtime = OnnxRuntime()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for file in next(iter(stitched.decoder.segments.values())).file.parent.glob("weights-*"):
            shutil.copy(file, directory)  # the runtime follows no links
        for name, segment in stitched.decoder.segments.items():
            model = onnx.load(segment.file, load_external_data=False)
            casts = [node for node in model.graph.node if node.op_type == "Cast"]
            for node in casts:
                node.attribute[0].i = onnx.TensorProto.FLOAT
            cast = {name for node in casts for name in node.output}
            for info in model.graph.value_info:
                if info.name in cast:
                    info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            file = directory / segment.file.name
            onnx.save(model, file)
            stitched.decoder.programs[name] = runtime.load(replace(segment, file=file), b"")


def _top(leaves: np.ndarray, scores: np.ndarray) -> dict[int, float]:
    kept = zip(leaves[:TOP_K].tolist(), scores[:TOP_K].tolist(), strict=True)
    return {leaf: score for leaf, score in kept if leaf >= 0}


def _mean_error(rows: list[dict[str, Any]]) -> float:
    """Over all beams of all batches."""
    beams = np.array([row["beams"] for row in rows])
    squares = np.array([(row["relative_rms"] * row["rms"]) ** 2 for row in rows])
    reference = np.array([row["rms"] ** 2 for row in rows])
    return float(np.sqrt((squares * beams).sum() / (reference * beams).sum()))


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_file, required=True)
    parser.add_argument("--bundle", type=Path, nargs="+", required=True)
    parser.add_argument("--histories", type=existing_file, required=True)
    parser.add_argument("--rows", type=positive, default=500)
    parser.add_argument("--batch", type=positive, default=8)
    arguments = parser.parse_args()
    bundles = {path: Bundle.load(path) for path in arguments.bundle}  # all of them before the first is measured
    torch.set_num_threads(1)
    result = ResultFile(arguments.out, {"environment": describe_environment()})
    for path, bundle in bundles.items():
        requests = requests_of(bundle, arguments.histories, arguments.rows, bundle.config.beam_width)
        recipes = sorted(set(bundle.plan.recipes.values()))
        for rounded in (True, False) if recipes == ["bf16"] else (True,):
            row = {
                "name": path.name,
                "runtime": Artifacts.load(path).runtime,
                "recipes": recipes,
                "inputs_rounded": rounded,
                **parity(bundle, requests, arguments.batch, rounded),
            }
            print(row, flush=True)
            result.add(row)


if __name__ == "__main__":
    run_command_line(main)
