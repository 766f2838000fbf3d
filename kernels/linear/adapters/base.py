"""What every library's adapter says and does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..presence import Presence

HOPPER = (9, 0)
FP8_TENSOR_CORES = (8, 9)


@dataclass(frozen=True)
class Problem:
    """A dense linear to run: x [rows, k] times a transposed weight [n, k] in a recipe, on a GPU of this capability."""

    recipe: str
    rows: int
    n: int
    k: int
    out_dtype: torch.dtype
    capability: tuple[int, int]


class Adapter(ABC):
    """One library behind the interface of `implementations.linear`.

    Attributes:
        library: its name in tables.
        implementations: names of what it runs; each in this library alone.
    """

    library: str
    implementations: tuple[str, ...]

    @abstractmethod
    def presence(self) -> Presence:
        """Its version, or the reason for its absence; importing it is part of the answer."""

    @abstractmethod
    def takes(self, implementation: str, problem: Problem) -> bool:
        """Whether an implementation computes this and is worth trying; false where the library is absent."""

    @abstractmethod
    def run(
        self,
        implementation: str,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """The product [M, N]; checked operands of `implementations.linear`.

        Raises:
            RuntimeError: the library is absent or refuses the shape.
        """

    def weight_scale(self, weight_scale: Tensor) -> Tensor:
        """Block scales of a weight laid out so that they are read in place."""
        return weight_scale.contiguous()
