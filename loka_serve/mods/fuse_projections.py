"""Fusing q, k, v and gate, up into one GEMM each, for checkpoints that hold them apart.

The model has the fused form only, so the rewrite happens while the checkpoint is read (`loka_serve.models.parts`),
whatever mods are asked for: rows are copied, nothing is computed. This mod tells which; `split_parts` takes it back.
"""

from __future__ import annotations

from loka_serve.mods.workspace import Rewrite, Workspace

NAME = "fuse_projections"


def fuse_projections(work: Workspace) -> list[Rewrite]:
    return [
        Rewrite(NAME, name, " + ".join(part.rpartition(".")[0].rpartition(".")[2] for part in parts), _nothing)
        for name, parts in work.apart.items()
    ]


def _nothing() -> None:
    """A model in memory stays fused: it has no other form."""
