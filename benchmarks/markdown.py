"""Markdown that the README's tables are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without alignment; cells are text without vertical bars."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 1) -> str:
    """With so many digits behind the point; nothing for nothing."""
    return "" if value is None else f"{value:.{digits}f}"


def ratio(numerator: float | None, denominator: float | None) -> str:
    """As `1.23x`; nothing where one is missing or 0."""
    return f"{numerator / denominator:.2f}x" if numerator and denominator else ""


def source(result: Mapping[str, Any]) -> str:
    """Where the figures come from."""
    environment = result["environment"]
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(environment["libraries"].items()))
    about = [f"{environment['gpu']}, driver {environment['driver']}, CUDA {environment['cuda']}, {libraries}"]
    if ceilings := result.get("ceilings"):
        about.append(
            f"ceilings of the same run: BF16 {ceilings['bf16_tflops']:.0f} and FP8 {ceilings['fp8_tflops']:.0f}"
            f" TFLOP/s, copy {ceilings['gb_per_s'] / 1e3:.2f} TB/s"
        )
    return f"{'; '.join(about)}. `{environment['command']}`"
