"""Streaming statistics of many groups of rows at once, kept as tensors where the rows are: no update waits for a GPU.

No row is kept. Tables of two parts of a stream merge into that of the whole, in any order up to float64 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

OCTAVES_BELOW, OCTAVES_ABOVE = 40, 24
BINS_PER_OCTAVE = 16
BINS = (OCTAVES_BELOW + OCTAVES_ABOVE) * BINS_PER_OCTAVE
_MANTISSA_BITS = 4
_FIRST_BIN = (127 - OCTAVES_BELOW) << _MANTISSA_BITS
_PIECE_VALUES = {"cpu": 1 << 17, "cuda": 1 << 23}
MAX_PENDING = 32
_FIELDS = ("rows", "non_finite", "absmax", "moments", "counts")


def magnitude_bins(magnitudes: Tensor) -> Tensor:
    """Bin of each finite, non-negative float32 value, int32 of the same shape; see `MagnitudeHistogram`."""
    # A float's exponent and first mantissa bits, read as an integer, number exactly these bins.
    return ((magnitudes.view(torch.int32) >> (23 - _MANTISSA_BITS)) - _FIRST_BIN).clamp_(0, BINS - 1)


def combine_moments(first: Tensor, second: Tensor) -> Tensor:
    """Central moments of the union of two disjoint samples, float64 ``[..., 5]``.

    The last axis is count, mean, and the sums of squared, cubed and fourth powers of the deviations from the mean
    (Pebay, SAND2008-6212, equations 2.1 to 2.3: the batched form of Welford's update). Empty samples are all zero.
    """
    count_a, mean_a, second_a, third_a, fourth_a = first.unbind(-1)
    count_b, mean_b, second_b, third_b, fourth_b = second.unbind(-1)
    total = count_a + count_b
    divisor = total.clamp(min=1)
    share_a, share_b = count_a / divisor, count_b / divisor
    delta = mean_b - mean_a
    weight = count_a * share_b
    return torch.stack(
        [
            total,
            mean_a + delta * share_b,
            second_a + second_b + delta.square() * weight,
            third_a
            + third_b
            + delta.pow(3) * weight * (share_a - share_b)
            + 3 * delta * (share_a * second_b - share_b * second_a),
            fourth_a
            + fourth_b
            + delta.pow(4) * weight * (share_a.square() - share_a * share_b + share_b.square())
            + 6 * delta.square() * (share_a.square() * second_b + share_b.square() * second_a)
            + 4 * delta * (share_a * third_b - share_b * third_a),
        ],
        -1,
    )


class StatisticsTable:
    """Statistics of each group's rows ``[M, K]``.

    Attributes:
        rows: int64 [groups], rows seen.
        non_finite: int64 [groups], NaN and infinite values seen; every other figure leaves them out.
        absmax: float32 [groups], largest finite magnitude, 0 before any row.
        moments: float64 [groups, 5], see `combine_moments`.
        counts: int64 [groups, BINS], magnitudes by bin.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.rows = torch.zeros(groups, dtype=torch.int64)
        self.non_finite = torch.zeros(groups, dtype=torch.int64)
        self.absmax = torch.zeros(groups)
        self.counts = torch.zeros(groups, BINS, dtype=torch.int64)
        self._moments = [torch.zeros(groups, 5, dtype=torch.float64)]

    @property
    def moments(self) -> Tensor:
        """Combined when they are read: on a GPU that is many kernels on few numbers, which an update need not pay."""
        while len(self._moments) > 1:
            stacked = torch.stack(self._moments)
            half, odd = len(stacked) // 2, len(stacked) % 2
            combined = combine_moments(stacked[:half], stacked[half : 2 * half])
            self._moments = [*combined, *([stacked[-1]] if odd else [])]
        return self._moments[0]

    @moments.setter
    def moments(self, moments: Tensor) -> None:
        self._moments = [moments]

    @torch.inference_mode()
    def update(self, values: Tensor, groups: Tensor | None = None) -> None:
        """Add rows.

        Args:
            values: [M, K], any float dtype and device; the table moves to it.
            groups: int64 [M] on the same device, the group of each row; None: all are of group 0.
        """
        self._move(values.device)
        # In pieces: the float64 copies in between are then small beside any tensor worth watching.
        rows = max(1, _PIECE_VALUES.get(values.device.type, 1 << 17) // max(1, values.shape[1]))
        for start in range(0, values.shape[0], rows):
            piece = slice(start, start + rows)
            self._update(values[piece].detach().float(), None if groups is None else groups[piece])

    def _update(self, values: Tensor, groups: Tensor | None) -> None:
        finite = values.isfinite()
        magnitudes = torch.where(finite, values.abs(), 0)
        counts = self._by_group(finite.sum(1), groups)
        self.rows += self._by_group(torch.ones_like(finite[:, 0], dtype=torch.int64), groups)
        self.non_finite += self._by_group((~finite).sum(1), groups)
        if groups is None:
            self.absmax = torch.maximum(self.absmax, magnitudes.max())
        else:
            self.absmax.scatter_reduce_(0, groups, magnitudes.amax(1), "amax")
        self._count(magnitudes, finite, groups)
        # Two passes within the piece: no cancellation however large the mean.
        exact = torch.where(finite, values, 0).double()
        mean = self._by_group(exact.sum(1), groups) / counts.clamp(min=1)
        exact -= mean if groups is None else mean[groups][:, None]
        exact *= finite
        squares = exact.square()
        moments = [counts.double(), mean, *(self._by_group((squares * power).sum(1), groups) for power in (1.0, exact))]
        moments.append(self._by_group(squares.square_().sum(1), groups))
        if len(self._moments) >= MAX_PENDING:
            self.moments = self.moments
        self._moments.append(torch.stack(moments, -1))

    def _count(self, magnitudes: Tensor, finite: Tensor, groups: Tensor | None) -> None:
        bins = magnitude_bins(magnitudes)
        if groups is not None:
            bins = bins + BINS * groups[:, None]
        flat = self.counts.view(-1)
        if magnitudes.device.type == "cpu":
            bins = bins[finite] if not bool(finite.all()) else bins.flatten()
            flat += torch.bincount(bins, minlength=flat.numel())
        else:  # bincount would wait for the largest bin
            flat.index_add_(0, bins.flatten().long(), finite.flatten().long())

    def _by_group(self, of_rows: Tensor, groups: Tensor | None) -> Tensor:
        """Sums [groups] of one figure a row [M]."""
        if groups is None:
            return of_rows.sum(0, keepdim=True)
        return of_rows.new_zeros(self.groups).index_add_(0, groups, of_rows)

    @torch.inference_mode()
    def merge(self, other: StatisticsTable) -> None:
        """Take in the table of another part of the stream; raises ValueError if it has other groups."""
        if other.groups != self.groups:
            raise ValueError(f"statistics of {other.groups} groups: expected {self.groups}")
        theirs = {name: tensor.to(self.rows.device) for name, tensor in other.state().items()}
        self.rows += theirs["rows"]
        self.non_finite += theirs["non_finite"]
        self.counts += theirs["counts"]
        self.absmax = torch.maximum(self.absmax, theirs["absmax"])
        self.moments = combine_moments(self.moments, theirs["moments"])

    def group(self, index: int) -> StatisticsTable:
        """A copy of one group's row of the table."""
        one = StatisticsTable(1)
        for name, tensor in self.state().items():
            setattr(one, name, tensor[index : index + 1].clone())
        return one

    def total(self) -> StatisticsTable:
        """All groups together."""
        whole = self.group(0)
        for index in range(1, self.groups):
            whole.merge(self.group(index))
        return whole

    def state(self) -> dict[str, Tensor]:
        """All tensors by attribute name."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> StatisticsTable:
        """The inverse of `state`; raises ValueError for a tensor that is missing or misshapen."""
        table = cls(state["rows"].numel() if "rows" in state else 0)
        for name, expected in table.state().items():
            found = state.get(name)
            if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
                seen = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise ValueError(f"{name}: expected {expected.dtype} {list(expected.shape)}, found {seen}")
            setattr(table, name, found)
        return table

    def _move(self, device: torch.device) -> None:
        if self.rows.device != device:
            for name, tensor in self.state().items():
                setattr(self, name, tensor.to(device))


def group_of_rows(group_offsets: Tensor, rows: int) -> Tensor:
    """Group of each of `rows` rows that are sorted by group, int64 [rows]; offsets int64 [groups + 1]."""
    places = torch.arange(rows, device=group_offsets.device)
    return torch.searchsorted(group_offsets[1:].contiguous(), places, right=True)
