"""Choices that do not look at the batch: a row's result is then the same bits whatever stands beside it.

A product over the whole of K in a fixed order depends on its own row alone, if the tiling is the same for every number
of rows; libraries choose by rows, so none is used. Beam attention takes whole tiles, whose sum over the slots is never
cut up. All other kernels compute row by row (or, like top-k, exactly) whatever the options.
"""

from __future__ import annotations

from .beam_attention.configurations import WHOLE_TILES
from .dispatch import Dispatch
from .moe.configurations import Configuration, choose_configuration
from .moe.cuda import warp_specialized_takes
from .moe.reference import ExpertWeights
from .moe.routing import RouterTiling

ATTENTION = WHOLE_TILES
LINEAR = "triton_64x128"
ROUTER = RouterTiling(16)
ANY_ROWS = 1 << 40  # the entry for the most rows, which computes any number


class BatchInvariantDispatch(Dispatch):
    """A table of one implementation for every dense linear at every number of rows."""

    def choose(self, op: str, recipe: str, n: int, k: int, rows: int) -> str:
        return LINEAR


def experts_configuration(weights: ExpertWeights) -> Configuration:
    """What runs the grouped GEMMs for every number of tokens."""
    pairs = ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale))
    return choose_configuration(
        ANY_ROWS,
        1,
        fp8=weights.gate_up_scale is not None,
        warp_specialized=all(warp_specialized_takes(weight, scale) for weight, scale in pairs),
    )
