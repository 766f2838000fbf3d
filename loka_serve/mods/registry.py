"""All mods by name, and their application to a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loka_serve.mods import fold_norm_gains as folding
from loka_serve.mods.fold_biases import fold_biases
from loka_serve.mods.fold_whole_norm_gains import fold_whole_norm_gains
from loka_serve.mods.fuse_projections import fuse_projections
from loka_serve.mods.layout import layout
from loka_serve.mods.names import EXACT_MODS, MOD_NAMES
from loka_serve.mods.pad_widths import pad_widths
from loka_serve.mods.smooth import smooth
from loka_serve.mods.workspace import Rewrite, Workspace


@dataclass(frozen=True)
class Mod:
    """One named rewrite.

    Attributes:
        exact: leaves the function as it is, bit for bit or to float32 rounding.
        summary: what it does, in one line.
        apply: makes the changes and tells them.
    """

    name: str
    summary: str
    apply: Callable[[Workspace], list[Rewrite]]

    @property
    def exact(self) -> bool:
        return self.name in EXACT_MODS


MODS: dict[str, Mod] = {
    mod.name: mod
    for mod in (
        Mod("fuse_projections", "q, k, v and gate, up held apart become one GEMM each", fuse_projections),
        Mod("fold_biases", "biases of keys and values go into the attention's output", fold_biases),
        Mod("fold_norm_gains", "powers of two in norm gains go into the next linears", folding.fold_norm_gains),
        Mod("fold_whole_norm_gains", "norm gains go into the next linears whole", fold_whole_norm_gains),
        Mod("smooth", "outlier channels are scaled by powers of two, weights take the scale", smooth),
        Mod("pad_widths", "inner widths of feed-forwards become multiples of 128", pad_widths),
        Mod("layout", "weights lie as GEMMs and engines read them", layout),
    )
}
assert tuple(MODS) == MOD_NAMES


def apply_mods(work: Workspace, names: Sequence[str]) -> list[Rewrite]:
    """Apply mods in the order given; afterwards the model's sites run on plain weights."""
    rewrites = []
    for name in names:
        rewrites += MODS[name].apply(work)
    return rewrites


def revert(rewrites: Sequence[Rewrite]) -> None:
    """Take rewrites back, last first."""
    for rewrite in reversed(rewrites):
        rewrite.undo()
