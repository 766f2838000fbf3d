"""`python -m loka_serve.engines.tensorrt inspect BUNDLE`: what a bundle's segments multiply, weigh and were built from.

Where the bundle's runtime is TensorRT and its plans load, their layers too, and which products multiply E4M3 codes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from loka_serve.bundle import Bundle
from loka_serve.engines.tensorrt.artifacts import Artifacts
from loka_serve.engines.tensorrt.inspection import (
    E4M3,
    SegmentDescription,
    build_command,
    describe_segment,
    fused,
    plan_layers,
)
from loka_serve.engines.tensorrt.runtimes import make_runtime
from loka_serve.engines.tensorrt.runtimes.base import Segment
from loka_serve.engines.tensorrt.runtimes.nvidia import NvidiaProgram
from loka_serve.errors import LokaError

SHORT = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", E4M3: "FP8"}
VERDICTS = {True: "fused", False: "NOT fused", None: "not told by the plan"}
Describe = Callable[[Segment], str]


def inspect(bundle: Bundle, segment: str | None, layers: bool, describe: Describe | None) -> Iterator[str]:
    """Lines about a bundle's segments.

    Args:
        segment: the one to tell about; None for all.
        layers: list every layer of a plan.
        describe: gives the inspector's JSON of a segment's plan; None where plans do not load here.

    Raises:
        LokaError: the bundle was not built for this engine, or has no such segment.
    """
    artifacts = Artifacts.load(bundle.path)
    names = [part.name for part in artifacts.stitching.segments]
    if segment is not None and segment not in names:
        raise LokaError(f"segment {segment!r}: expected one of {', '.join(names)}")
    environment = ", ".join(f"{key} {value}" for key, value in artifacts.environment.items()) or "any version"
    title = f"{len(names)} segments for {artifacts.runtime} ({environment}), {artifacts.dtype} between them"
    yield f"{bundle.path}: {title}"
    totals = {"weights": 0, "plans": 0}
    for part in artifacts.stitching.segments:
        if segment is not None and part.name != segment:
            continue
        description = describe_segment(part)
        plan = artifacts.plans.get(part.name)
        plan_bytes = (bundle.path / plan).stat().st_size if plan else 0
        totals["weights"] += sum(description.weight_bytes.values())
        totals["plans"] += plan_bytes
        yield from _segment_lines(description, plan_bytes)
        found = plan_layers(describe(part)) if plan and describe is not None else []
        for product in description.products:
            verdict = f", {VERDICTS[fused(product, found)]}" if found and product.weight == E4M3 else ""
            yield f"  {product.name}: {SHORT[product.inputs]} x {SHORT[product.weight]}{verdict}"
        if layers:
            yield from (f"  layer {one.name} ({one.kind}): {_io(one.inputs)} -> {_io(one.outputs)}" for one in found)
        if plan:
            yield "  " + build_command(
                artifacts.runtime,
                artifacts.environment.get("version", ""),
                part,
                artifacts.profiles[part.name],
                plan,
                artifacts.environment.get("compute_capabilities", ""),
            )
    yield f"weights {_size(totals['weights'])}, plans {_size(totals['plans'])}"


def _segment_lines(description: SegmentDescription, plan_bytes: int) -> Iterator[str]:
    weights = ", ".join(f"{SHORT.get(kind, kind)} {_size(size)}" for kind, size in description.weight_bytes.items())
    plan = f"; plan {_size(plan_bytes)}" if plan_bytes else ""
    yield f"{description.name}: {description.nodes} nodes; weights {weights}{plan}"


def _io(types: Sequence[str]) -> str:
    return ", ".join(types) or "?"


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def plan_describer(bundle: Bundle) -> tuple[Describe | None, str]:
    """What reads the bundle's plans on this machine; None and the reason where it cannot."""
    artifacts = Artifacts.load(bundle.path)
    if not artifacts.plans:
        return None, f"{artifacts.runtime} has no plans"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        runtime = make_runtime(artifacts.runtime, device)
        artifacts.check(runtime, artifacts.limits)
        first = artifacts.stitching.segments[0]
        runtime.load(first, (bundle.path / artifacts.plans[first.name]).read_bytes())
    except LokaError as error:
        return None, str(error)

    def describe(segment: Segment) -> str:
        program = runtime.load(segment, (bundle.path / artifacts.plans[segment.name]).read_bytes())
        assert isinstance(program, NvidiaProgram)
        return program.describe()

    return describe, ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0, or 2 for a bundle that cannot be read or was not built for this engine."""
    parser = argparse.ArgumentParser("python -m loka_serve.engines.tensorrt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="tell about a bundle's segments and plans")
    command.add_argument("bundle", type=Path)
    command.add_argument("--segment", help="only this one")
    command.add_argument("--layers", action="store_true", help="every layer of the plans")
    given = parser.parse_args(arguments)
    try:
        bundle = Bundle.load(given.bundle, verify=False)
        describe, reason = plan_describer(bundle)
        for line in inspect(bundle, given.segment, given.layers, describe):
            print(line)
    except LokaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if reason:
        print(f"layers of plans are not told here: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
