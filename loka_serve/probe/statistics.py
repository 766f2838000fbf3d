"""Streaming statistics of tensors: absmax, mean, variance, kurtosis and quantiles of the magnitude, in bounded memory.

No tensor is kept. Statistics of two parts of a stream merge into those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka_serve.probe.statistics_table import (
    BINS,
    BINS_PER_OCTAVE,
    OCTAVES_BELOW,
    StatisticsTable,
    group_of_rows,
    magnitude_bins,
)


class MagnitudeHistogram:
    """Counts of |x| in fixed bins: 16 equal steps within each power of two, from 2**-40 to 2**24.

    A bin is at most 1/16 of its lower edge wide, so a quantile read from it is off by at most that, relatively. Smaller
    magnitudes (zeros too) count in the first bin, larger ones in the last. 8 KiB whatever the stream's length.

    Attributes:
        counts: int64 [1024].
    """

    def __init__(self, counts: Tensor | None = None) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64) if counts is None else counts

    def update(self, magnitudes: Tensor) -> None:
        """Count finite, non-negative float32 values of any shape."""
        bins = magnitude_bins(magnitudes.float().contiguous().flatten())
        self.counts += torch.bincount(bins, minlength=BINS).cpu()

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
        index = min(index, BINS - 1)
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
        kurtosis: fourth standardised moment, 3 for a Gaussian, NaN for constant values; large where few values are far
            out, which costs a shared scale its precision.
    """

    rows: int
    absmax: float
    p99: float
    mean: float
    variance: float
    octaves: Mapping[int, int] = field(default_factory=dict)
    kurtosis: float = math.nan


class TensorStatistics:
    """Statistics of a stream of rows ``[M, K]``.

    Attributes:
        table: what has been gathered; on the device of the last rows.
    """

    def __init__(self, table: StatisticsTable | None = None) -> None:
        self.table = table or StatisticsTable(1)

    @property
    def rows(self) -> int:
        """Rows seen."""
        return int(self.table.rows)

    @property
    def non_finite(self) -> int:
        """NaN and infinite values seen; every other statistic leaves them out."""
        return int(self.table.non_finite)

    @property
    def absmax(self) -> float:
        """Largest finite magnitude, 0.0 before any row."""
        return float(self.table.absmax)

    @property
    def histogram(self) -> MagnitudeHistogram:
        """A copy of the histogram of the magnitudes."""
        return MagnitudeHistogram(self.table.counts[0].cpu().clone())

    def update(self, values: Tensor) -> None:
        """Add rows ``[M, K]`` of any float dtype and device."""
        self.table.update(values)

    def merge(self, other: TensorStatistics) -> None:
        """Take in the statistics of another part of the stream."""
        self.table.merge(other.table)

    def summary(self) -> Summary:
        """NaN mean, variance, kurtosis and p99 when no finite value was seen."""
        count, mean, squares, _, fourth = self.table.moments[0].tolist()
        if not count:
            return Summary(self.rows, self.absmax, math.nan, math.nan, math.nan)
        histogram = self.histogram
        return Summary(
            rows=self.rows,
            absmax=self.absmax,
            p99=min(histogram.quantile(0.99), self.absmax),  # known to 1/16; the exact maximum bounds it
            mean=mean,
            variance=squares / count,
            octaves=histogram.octaves(),
            kurtosis=count * fourth / squares**2 if squares > 0 else math.nan,
        )


class GroupStatistics:
    """Statistics of each group (expert) of a grouped site.

    Attributes:
        table: what has been gathered, a row a group.
    """

    def __init__(self, groups: int, table: StatisticsTable | None = None) -> None:
        self.table = table or StatisticsTable(groups)

    @property
    def groups(self) -> list[TensorStatistics]:
        """A copy of the statistics of each group."""
        return [TensorStatistics(self.table.group(index)) for index in range(self.table.groups)]

    def update(self, values: Tensor, group_offsets: Tensor) -> None:
        """Add rows ``[M, K]`` sorted by group; group g owns rows group_offsets[g] to group_offsets[g + 1]."""
        if len(values):
            self.table.update(values, group_of_rows(group_offsets.to(values.device), len(values)))

    def update_group(self, group: int, values: Tensor) -> None:
        """Add rows ``[M, K]`` of one group."""
        self.table.update(values, torch.full((len(values),), group, device=values.device))

    def merge(self, other: GroupStatistics) -> None:
        """Take in the statistics of another part of the stream."""
        self.table.merge(other.table)

    def total(self) -> TensorStatistics:
        """All groups together."""
        return TensorStatistics(self.table.total())
