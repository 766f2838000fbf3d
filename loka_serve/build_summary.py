"""What a build did, and the line that says it."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_serve.gate import GateResult
from loka_serve.mods.report import ModReport
from loka_serve.probe.report import SiteReport, format_bytes, weight_bytes_ratio


@dataclass(frozen=True)
class BuildOutcome:
    """What a build did. `path` is where the bundle is: beside the place asked for if the gate failed.

    `comparison` is what `loka_serve.compare.comparison` gives, where one was asked for; `engines` what
    `loka_serve.build_engines.build_fastest` found, for ``--engine auto``.
    """

    path: Path
    sites: list[SiteReport]
    mods: ModReport
    gate: GateResult
    comparison: dict[str, Any] | None
    seconds: float
    engines: dict[str, Any] | None = None


def summarize(outcome: BuildOutcome) -> str:
    """One line: where the bundle is, what became of the weights, the gate's figures, time and memory."""
    quantized = [site for site in outcome.sites if site.choice.recipe != "bf16"]
    ratio = weight_bytes_ratio(outcome.sites)
    before, after = sum(site.bf16_bytes for site in quantized), sum(site.weight_bytes for site in quantized)
    weights = f", their weights {format_bytes(before)} -> {format_bytes(after)} ({ratio:.3f}x)" if quantized else ""
    gate = outcome.gate
    return (
        f"{outcome.path}: {len(quantized)} of {len(outcome.sites)} sites quantized{weights}; "
        f"gate {'passed' if gate.passed else 'FAILED'}: top-{gate.top_k} overlap with BF16 {gate.top_k_overlap:.3f} "
        f"(at least {gate.min_top_k_overlap:g}), top-1 {gate.top_1_agreement:.3f} over {gate.rows} histories; "
        f"{outcome.seconds:.1f} s, peak {format_bytes(peak_memory())}"
    )


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    try:
        # Unlike getrusage, this does not count what a parent process held when it started us.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
