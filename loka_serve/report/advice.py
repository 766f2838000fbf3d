"""What a failed gate says: which sites cost most, and what `auto` would do about them."""

from __future__ import annotations

from collections.abc import Sequence

from loka_serve.gate import GateResult
from loka_serve.probe.choose import choose
from loka_serve.probe.report import SiteReport, costliest_sites

SITES = 5


def advice(sites: Sequence[SiteReport], gate: GateResult, recipe: str) -> list[str]:
    """Lines for standard error.

    Args:
        sites: with the errors of all recipes.
        recipe: that the build was asked for.
    """
    low, high = gate.top_k_interval
    lines = [
        f"gate: top-{gate.top_k} overlap {gate.top_k_overlap:.3f} ({low:.3f} to {high:.3f} with 95 % confidence) is "
        f"below --min-top-k-overlap {gate.min_top_k_overlap:g}"
    ]
    costliest = costliest_sites(sites, SITES)
    if not costliest:
        return [*lines, "no site is quantized: the difference lies in the engines, not in the recipes"]
    lines.append("the sites that cost most:")
    lines += [f"  {_site(site)}" for site in costliest]
    if recipe == "auto":
        lines.append(
            "this is what auto chose: each site is within its bound, all together they are not; left are more "
            "--calibration-rows, --mods all and --recipe bf16"
        )
    else:
        lines.append("--recipe auto builds that; --compare measures every recipe on the same histories")
    return lines


def _site(site: SiteReport) -> str:
    recipe = site.choice.recipe
    error = site.errors[recipe].output.relative_frobenius
    auto = choose(site.kind, site.errors)
    would = f"auto would keep {recipe}" if auto.recipe == recipe else f"auto would take {auto.recipe}"
    cost = "" if site.cost is None else f", KL {site.cost.kl_divergence:.2g}"
    return f"{site.name} ({recipe}, error {error:.3f}{cost}): {would}: {auto.reason}"
