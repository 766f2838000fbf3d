"""Kinds of site: what a site is for decides which recipes suit it and how its error is judged."""

from __future__ import annotations

from typing import Literal

from loka_serve.models.layers import GroupedLinear, Linear

SiteKind = Literal["linear", "grouped", "router", "head"]


def site_kind(name: str, module: Linear | GroupedLinear) -> SiteKind:
    """`grouped` for experts, `router` and `head` (one a level) by name, `linear` for all else."""
    if isinstance(module, GroupedLinear):
        return "grouped"
    if name.endswith(".router"):
        return "router"
    return "head" if name.startswith("heads.") else "linear"
