"""What the probe found, one row a site: the content of ``probe.json`` and the table that the build prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loka_serve.probe.choose import Choice
from loka_serve.probe.cost import ModelCost
from loka_serve.probe.measure import RecipeError
from loka_serve.probe.sites import SiteKind
from loka_serve.probe.statistics import Summary
from loka_serve.probe.synthesis import SyntheticErrors

BF16_BYTES = 2


@dataclass(frozen=True)
class GroupReport:
    """One group (expert) of a grouped site: its inputs in calibration and its weight; see `Summary` for the figures."""

    rows: int
    absmax: float
    p99: float = math.nan
    variance: float = math.nan
    kurtosis: float = math.nan
    weight_absmax: float = math.nan
    weight_p99: float = math.nan
    weight_variance: float = math.nan
    weight_kurtosis: float = math.nan


@dataclass(frozen=True)
class SiteReport:
    """One site of the model.

    Attributes:
        shape: of the weight.
        inputs, weight: statistics of calibration's inputs and of the weight.
        groups: of a grouped site's inputs; empty otherwise.
        errors: of every recipe that was measured.
        choice: the recipe that the site runs, and why.
        weight_bytes: bytes that the bundle stores for it, scales included.
        synthetic: errors on synthetic pairs, with intervals; None if none were drawn.
        cost: change of the whole model's answers if this site alone is quantized; None if not measured.
    """

    name: str
    kind: SiteKind
    shape: tuple[int, ...]
    inputs: Summary
    weight: Summary
    groups: tuple[GroupReport, ...]
    errors: Mapping[str, RecipeError]
    choice: Choice
    weight_bytes: int
    synthetic: SyntheticErrors | None = None
    cost: ModelCost | None = None

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the same weight in bfloat16."""
        return BF16_BYTES * math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """The ``probe.json`` form; figures that are not finite become null."""
        values: dict[str, Any] = _without_non_finite(asdict(self))
        values["bf16_bytes"] = self.bf16_bytes
        return values


def weight_bytes_ratio(sites: Sequence[SiteReport]) -> float:
    """Bytes of the quantized sites' weights, scales included, over those in bfloat16; NaN if none is quantized."""
    quantized = [site for site in sites if site.choice.recipe != "bf16"]
    if not quantized:
        return math.nan
    return sum(site.weight_bytes for site in quantized) / sum(site.bf16_bytes for site in quantized)


def costliest_sites(sites: Sequence[SiteReport], count: int) -> list[SiteReport]:
    """The quantized sites that cost the model most, first the costliest.

    By the KL divergence of the model's logits where that was measured at all of them, else by the site's own relative
    Frobenius error.
    """
    quantized = [site for site in sites if site.choice.recipe != "bf16" and site.errors]
    costs = [site.cost for site in quantized if site.cost is not None]
    if costs and len(costs) == len(quantized):
        order = [cost.kl_divergence for cost in costs]
    else:
        order = [site.errors[site.choice.recipe].output.relative_frobenius for site in quantized]
    ranked = sorted(range(len(quantized)), key=lambda place: -order[place])
    return [quantized[place] for place in ranked[:count]]


HEADINGS = ("site", "weight", "recipe", "MERE", "Frobenius", "absmax", "p99", "bf16 ->", "stored")


def format_table(sites: Sequence[SiteReport]) -> str:
    """A table for people: errors of the chosen recipe (MERE floored), absmax and p99 of the inputs, bytes."""
    rows = [HEADINGS]
    for site in sites:
        error = site.errors.get(site.choice.recipe)
        rows.append(
            (
                site.name,
                " x ".join(str(width) for width in site.shape),
                site.choice.recipe,
                f"{error.output.floored_mere:.4f}" if error else "-",
                f"{error.output.relative_frobenius:.4f}" if error else "-",
                f"{site.inputs.absmax:.3g}",
                f"{site.inputs.p99:.3g}",
                format_bytes(site.bf16_bytes),
                format_bytes(site.weight_bytes),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
