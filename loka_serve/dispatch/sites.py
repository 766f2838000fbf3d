"""What of a model is measured: one GEMM for each shape that its sites have, the experts' pair as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from loka_serve.engines.hopper.tuning import ROW_GRID
from loka_serve.kernels.dispatch import EXPERTS, Dispatch, Shape
from loka_serve.kernels.linear.implementations import MEASURED_RECIPES
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.sites import site_kind

ROWS = tuple(rows for rows in ROW_GRID if rows <= 16384)
"""Numbers of rows that are measured unless told otherwise; the engine takes the next larger one of these."""
EXPERT_RECIPES = ("bf16", "fp8_block")
"""What experts are computed in: 1 x 128 codes leave their first GEMM."""


@dataclass(frozen=True)
class Work:
    """One kind of work of a table: fields as of `loka_serve.kernels.dispatch.Shape`, without recipe and rows."""

    op: str
    n: int
    k: int
    groups: int = 1
    slots: int = 1
    shared: int = 0

    @property
    def key(self) -> tuple[str, int, int, int]:
        """As `Dispatch.sites` has it."""
        return self.op, self.n, self.k, self.groups

    def shape(self, recipe: str, rows: int) -> Shape:
        """The entry's key."""
        return Shape(self.op, recipe, self.n, self.k, rows, self.groups, self.slots, self.shared)


def work_of_sites(config: OneRecV2Config) -> dict[str, Work]:
    """The work of each site by its name, those aside that the engine runs inside other kernels: routers in BF16.

    A single shared expert runs as one more routed one, as the engine packs it.
    """
    with torch.device("meta"):
        sites = OneRecV2(config).sites()
    joined = int(config.experts > 0 and config.shared_experts == 1)
    experts = Work(
        EXPERTS,
        n=config.expert_width,
        k=config.d_model,
        groups=config.experts + joined,
        slots=config.experts_per_token + joined,
        shared=joined,
    )
    found = {}
    for name, module in sites.items():
        kind = site_kind(name, module)
        assert module.weight is not None
        if kind == "grouped" or (joined and ".moe.shared." in name):
            found[name] = experts
        elif kind != "router":
            n, k = module.weight.shape
            found[name] = Work("linear_float32" if kind == "head" else "linear", n, k)
    return found


def names_of_work(sites: dict[str, Work]) -> dict[Work, str]:
    """For tables: the names of the sites that share a shape, numbers as a star."""
    names: dict[Work, dict[str, None]] = {}
    for name, work in sites.items():
        names.setdefault(work, {})[re.sub(r"\d+", "*", name)] = None
    return {work: ", ".join(they) for work, they in names.items()}


def shapes_to_measure(
    works: Iterable[Work], rows: Sequence[int] = ROWS, recipes: Sequence[str] = MEASURED_RECIPES
) -> list[Shape]:
    """Every work in every recipe at every number of rows; all recipes of a number of rows after one another."""
    return [
        work.shape(recipe, count)
        for count in rows
        for work in works
        for recipe in recipes
        if work.op != EXPERTS or recipe in EXPERT_RECIPES
    ]


def speedup(table: Dispatch, work: Work, recipe: str, rows: Iterable[int]) -> float | None:
    """BF16's time over the recipe's, both by their fastest implementations and summed over these numbers of rows.

    None where the table has no such work in both.
    """
    total = baseline = 0.0
    for count in rows:
        entry = table.entry(work.op, recipe, work.n, work.k, count, work.groups)
        if entry is not None and entry.bf16_us is not None:
            total += min(entry.us.values())
            baseline += entry.bf16_us
    return baseline / total if total else None
