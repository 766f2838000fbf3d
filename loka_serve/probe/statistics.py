"""Streaming statistics of tensors: absmax, mean, variance and quantiles of the magnitude, in bounded memory.

No tensor is kept. Statistics of two parts of a stream merge into those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

OCTAVES_BELOW, OCTAVES_ABOVE = 40, 24
BINS_PER_OCTAVE = 16
_MANTISSA_BITS = 4
_PIECE_VALUES = 1 << 18
_BINS = (OCTAVES_BELOW + OCTAVES_ABOVE) * BINS_PER_OCTAVE
_FIRST_BIN = (127 - OCTAVES_BELOW) << _MANTISSA_BITS


class MagnitudeHistogram:
    """Counts of |x| in fixed bins: 16 equal steps within each power of two, from 2**-40 to 2**24.

    A bin is at most 1/16 of its lower edge wide, so a quantile read from it is off by at most that, relatively. Smaller
    magnitudes (zeros too) count in the first bin, larger ones in the last. 8 KiB whatever the stream's length.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(_BINS, dtype=torch.int64)

    def update(self, magnitudes: Tensor) -> None:
        """Count finite, non-negative float32 values of any shape."""
        # A float's exponent and first mantissa bits, read as an integer, number exactly these bins.
        bins = (magnitudes.float().contiguous().flatten().view(torch.int32) >> (23 - _MANTISSA_BITS)) - _FIRST_BIN
        self.counts += torch.bincount(bins.clamp_(0, _BINS - 1), minlength=_BINS).cpu()

    def merge(self, other: MagnitudeHistogram) -> None:
        self.counts += other.counts

    def quantile(self, q: float) -> float:
        """The magnitude below which a share `q` (0..1) of the values lies; NaN if there are none."""
        total = int(self.counts.sum())
        if total == 0:
            return float("nan")
        cumulative = self.counts.cumsum(0)
        target = max(q * total, 1e-9)
        index = int(torch.searchsorted(cumulative.double(), torch.tensor(target, dtype=torch.float64)))
        index = min(index, _BINS - 1)
        below = int(cumulative[index - 1]) if index else 0
        inside = (target - below) / int(self.counts[index])
        low, high = _bin_edge(index), _bin_edge(index + 1)
        # The first bin also holds everything smaller, down to 0.
        return inside * high if index == 0 else low + inside * (high - low)

    def octaves(self) -> dict[int, int]:
        """Values by power of two, where there are any: n -> how many magnitudes from 2**n to 2**(n + 1)."""
        totals = self.counts.view(-1, BINS_PER_OCTAVE).sum(1).tolist()
        return {octave - OCTAVES_BELOW: total for octave, total in enumerate(totals) if total}


def _bin_edge(index: int) -> float:
    octave, step = divmod(index, BINS_PER_OCTAVE)
    return float(2.0 ** (octave - OCTAVES_BELOW) * (1.0 + step / BINS_PER_OCTAVE))


@dataclass(frozen=True)
class Summary:
    """What a statistic says in the end, over all values of all rows.

    Attributes:
        rows: rows seen.
        absmax, p99: largest magnitude and its 99th percentile.
        mean, variance: of the values; the variance is that of a population.
        octaves: the histogram of the magnitudes, see `MagnitudeHistogram.octaves`.
    """

    rows: int
    absmax: float
    p99: float
    mean: float
    variance: float
    octaves: Mapping[int, int] = field(default_factory=dict)


class TensorStatistics:
    """Statistics of a stream of rows ``[M, K]``.

    Attributes:
        rows: rows seen.
        non_finite: NaN and infinite values seen; every other statistic leaves them out.
        absmax: largest finite magnitude, 0.0 before any row.
        histogram: of the magnitudes.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.non_finite = 0
        self.absmax = 0.0
        self.histogram = MagnitudeHistogram()
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean

    def update(self, values: Tensor) -> None:
        """Add rows ``[M, K]`` of any float dtype and device."""
        self.rows += values.shape[0]
        # In pieces: the float32 copies and masks in between are then small beside any tensor worth watching.
        rows = max(1, _PIECE_VALUES // max(1, values.shape[1]))
        for start in range(0, values.shape[0], rows):
            self._update(values[start : start + rows].detach().float().flatten())

    def _update(self, values: Tensor) -> None:
        finite = values.isfinite()
        if not bool(finite.all()):
            self.non_finite += int((~finite).sum())
            values = values[finite]
        if not values.numel():
            return
        magnitudes = values.abs()
        self.absmax = max(self.absmax, float(magnitudes.max()))
        self.histogram.update(magnitudes)
        # Two-pass within the batch, in float64: no cancellation however large the mean.
        mean = float(values.mean(dtype=torch.float64))
        squares = float((values - mean).square_().sum(dtype=torch.float64))
        self._combine(values.numel(), mean, squares)

    def merge(self, other: TensorStatistics) -> None:
        """Take in the statistics of another part of the stream."""
        self.rows += other.rows
        self.non_finite += other.non_finite
        self.absmax = max(self.absmax, other.absmax)
        self.histogram.merge(other.histogram)
        self._combine(other._count, other._mean, other._squares)

    def summary(self) -> Summary:
        """NaN mean, variance and p99 when no finite value was seen."""
        if not self._count:
            return Summary(self.rows, self.absmax, float("nan"), float("nan"), float("nan"))
        # The histogram knows p99 to 1/16; the exact maximum bounds it.
        p99 = min(self.histogram.quantile(0.99), self.absmax)
        variance = self._squares / self._count
        return Summary(self.rows, self.absmax, p99, self._mean, variance, self.histogram.octaves())

    def _combine(self, count: int, mean: float, squares: float) -> None:
        # Chan, Golub and LeVeque's update: the batched form of Welford's.
        total = self._count + count
        if not total:
            return
        delta = mean - self._mean
        self._squares += squares + delta * delta * self._count * count / total
        self._mean += delta * count / total
        self._count = total


class GroupStatistics:
    """`TensorStatistics` for each group of a grouped site."""

    def __init__(self, groups: int) -> None:
        self.groups = [TensorStatistics() for _ in range(groups)]

    def update(self, values: Tensor, group_offsets: Tensor) -> None:
        """Add rows ``[M, K]`` sorted by group; group g owns rows group_offsets[g] to group_offsets[g + 1]."""
        bounds = group_offsets.tolist()
        for statistics, start, end in zip(self.groups, bounds[:-1], bounds[1:], strict=True):
            if end > start:
                statistics.update(values[start:end])

    def total(self) -> TensorStatistics:
        """All groups together."""
        whole = TensorStatistics()
        for statistics in self.groups:
            whole.merge(statistics)
        return whole
