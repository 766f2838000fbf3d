"""What a batch computed on its way, copied out for comparisons with another engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from loka_serve.kernels.level_head.reference import AdvancedBeams


@dataclass(frozen=True, eq=False)
class LevelTrace:
    """One level's decode step.

    Attributes:
        codes, parents: int32 [batch, beams] of the beams that were extended; None at the first level.
        counts: int32 [batch], live beams among them.
        logits: float32 [batch, beams, V].
    """

    codes: Tensor | None
    parents: Tensor | None
    counts: Tensor
    logits: Tensor

    @classmethod
    def of(cls, beams: AdvancedBeams | None, counts: Tensor, logits: Tensor) -> Self:
        """Copies: the tensors themselves are overwritten by what follows."""
        codes, parents = (None, None) if beams is None else (beams.codes.clone(), beams.parents.clone())
        return cls(codes, parents, counts.clone(), logits.view(len(counts), -1, logits.shape[-1]).clone())
