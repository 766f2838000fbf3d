"""The last sampled requests' inputs of one site, and how far they are from calibration's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loka_serve.probe.site_statistics import SiteStatistics
from loka_serve.probe.statistics_table import BINS_PER_OCTAVE, OCTAVES_ABOVE, OCTAVES_BELOW

OCTAVES = OCTAVES_BELOW + OCTAVES_ABOVE
PSEUDO_COUNT = 0.5
"""Added to each bin of both histograms, so that one that is empty on one side has a logarithm; Jeffreys' prior."""
CONFIRMING_BATCHES = 3
"""Sampled batches that must reach a magnitude before it counts: one odd request never makes a site drift."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a site: magnitudes by power of two, and the largest.

    Attributes:
        octaves: int64 [64], how many magnitudes there are from 2**(i - 40) to 2**(i - 39).
        absmax: the largest of them.
        requests: of the batch that they come from; 0 where that does not matter.
    """

    octaves: NDArray[np.int64]
    absmax: float
    requests: int = 0

    @classmethod
    def from_summary(cls, octaves: Mapping[str, int], absmax: float) -> Inputs:
        """From the ``inputs`` of a site in ``probe.json``; raises ValueError for an octave that there is not."""
        counts = np.zeros(OCTAVES, np.int64)
        for octave, count in octaves.items():
            index = int(octave) + OCTAVES_BELOW
            if not 0 <= index < OCTAVES or count < 0:
                raise ValueError(f"{count} values in octave {octave}: expected counts in -40 to 23")
            counts[index] = count
        return cls(counts, float(absmax))

    @classmethod
    def from_statistics(cls, site: SiteStatistics, requests: int) -> Inputs:
        """All groups together: one expert alone sees too few rows to be judged by."""
        counts = site.table.counts.sum(0).view(OCTAVES, BINS_PER_OCTAVE).sum(1)
        return cls(counts.cpu().numpy(), float(site.table.absmax.max()), requests)


def population_stability_index(expected: NDArray[np.int64], found: NDArray[np.int64]) -> float:
    """How far one histogram is from another: sum over bins of (q - p) ln(q / p), 0 for equal shares p and q.

    The population stability index (Siddiqi, Credit Risk Scorecards, 2006; as a sum of the two Kullback-Leibler
    divergences: Yurdakul and Naranjo, J. Risk Model Validation 14(4), 2020). Bins that are empty in both do not count;
    0.5 is added to the others, so one that is empty in one of them costs a finite amount.

    Args:
        expected, found: counts [bins], neither all zero.
    """
    seen = (expected > 0) | (found > 0)
    p, q = (counts[seen].astype(np.float64) + PSEUDO_COUNT for counts in (expected, found))
    p, q = p / p.sum(), q / q.sum()
    return float(((q - p) * np.log(q / p)).sum())


class Window:
    """The inputs of the last sampled batches, `capacity` requests or a batch more.

    Attributes:
        baseline: calibration's.
    """

    def __init__(self, baseline: Inputs, capacity: int) -> None:
        self.baseline, self._capacity = baseline, capacity
        self.clear()

    @property
    def is_full(self) -> bool:
        """Whether there is enough to judge by."""
        return (
            self._requests >= self._capacity and len(self._batches) >= CONFIRMING_BATCHES and bool(self._octaves.sum())
        )

    def clear(self) -> None:
        """Forget all batches."""
        self._batches: deque[Inputs] = deque()
        self._requests, self._octaves = 0, np.zeros(OCTAVES, np.int64)

    def add(self, batch: Inputs) -> None:
        """Add a batch, and let go of those that the others can do without."""
        self._batches.append(batch)
        self._requests += batch.requests
        self._octaves += batch.octaves
        while self._requests - self._batches[0].requests >= self._capacity and len(self._batches) > CONFIRMING_BATCHES:
            oldest = self._batches.popleft()
            self._requests -= oldest.requests
            self._octaves -= oldest.octaves

    def stability_index(self) -> float:
        """`population_stability_index` of a full window against calibration."""
        return population_stability_index(self.baseline.octaves, self._octaves)

    def amax_ratio(self) -> float:
        """The largest magnitude that three batches of a full window reach, over calibration's largest."""
        reached = sorted((batch.absmax for batch in self._batches), reverse=True)[CONFIRMING_BATCHES - 1]
        if self.baseline.absmax == 0.0:
            return math.inf if reached > 0.0 else 0.0
        return reached / self.baseline.absmax
