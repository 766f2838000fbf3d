"""The multivariate Gaussian of a site's inputs: mean and covariance by batched Welford, in bounded memory.

No row is kept. Estimates of two parts of a stream merge into that of the whole, in any order up to float64 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loka_serve.probe.block_diagonal import block_width, dense, multiply, regularised, split_blocks

_PIECE_VALUES = {"cpu": 1 << 17, "cuda": 1 << 22}
_FIELDS = ("counts", "mean", "squares", "scatter")


class GaussianEstimate:
    """Mean and covariance of rows ``[M, N]``, of each group or of all (LoKA's probe, arXiv 2605.10886).

    Groups (experts) have a mean and a variance for every feature each; they share one correlation matrix, estimated
    from the deviations of all rows from their own group's mean. A row with a NaN or infinite value is left out.

    Memory: up to N = 512 features the whole covariance, beyond it one block for each 128 features (what lies outside
    the blocks counts as 0), in float64: 4 MB at N = 3584, and with all temporaries of an update below 200 MB.

    Attributes:
        counts: float64 [groups], rows seen.
        mean: float64 [groups, N].
        squares: float64 [groups, N], sums of squared deviations from the group's mean.
        scatter: float64 [blocks, width, width], sums of products of deviations, over all groups.
    """

    def __init__(self, features: int, groups: int = 1, width: int | None = None) -> None:
        self.features, self.groups = features, groups
        width = width or block_width(features)
        self.counts = torch.zeros(groups, dtype=torch.float64)
        self.mean = torch.zeros(groups, features, dtype=torch.float64)
        self.squares = torch.zeros(groups, features, dtype=torch.float64)
        self.scatter = torch.zeros(-(-features // width), width, width, dtype=torch.float64)

    @torch.inference_mode()
    def update(self, rows: Tensor, groups: Tensor | None = None) -> None:
        """Add rows.

        Args:
            rows: [M, N], any float dtype and device; the estimate moves to it.
            groups: int64 [M], the group of each row; None: all are of group 0.
        """
        self._move(rows.device)
        size = max(1, _PIECE_VALUES.get(rows.device.type, 1 << 17) // self.features)
        for start in range(0, rows.shape[0], size):
            piece = slice(start, start + size)
            self._update(rows[piece].detach(), None if groups is None else groups[piece])

    def _update(self, rows: Tensor, groups: Tensor | None) -> None:
        kept = rows.isfinite().all(1)
        exact = torch.where(kept[:, None], rows, 0).double()
        counts = self._by_group(kept.double(), groups)
        mean = self._by_group(exact, groups) / counts.clamp(min=1)[:, None]
        exact -= mean if groups is None else mean[groups]
        exact *= kept[:, None]
        # On the CPU the products are float32, twice as fast; on a GPU float64, which no TF32 setting can touch.
        deviations = exact.float() if exact.device.type == "cpu" else exact
        blocks = split_blocks(deviations, self.scatter.shape[-1])
        self.scatter += blocks.mT @ blocks
        self._combine(counts, mean, self._by_group(exact.square_(), groups))

    def _by_group(self, of_rows: Tensor, groups: Tensor | None) -> Tensor:
        if groups is None:
            return of_rows.sum(0, keepdim=True)
        return of_rows.new_zeros(self.groups, *of_rows.shape[1:]).index_add_(0, groups, of_rows)

    def _combine(self, counts: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Chan, Golub and LeVeque's update; the other part's own scatter is in already."""
        total = (self.counts + counts).clamp(min=1)
        delta = mean - self.mean
        weight = (self.counts * counts / total)[:, None]
        scaled = split_blocks(delta * weight.sqrt(), self.scatter.shape[-1])
        self.scatter += scaled.mT @ scaled
        self.squares += squares + delta.square() * weight
        self.mean += delta * (counts / total)[:, None]
        self.counts += counts

    @torch.inference_mode()
    def merge(self, other: GaussianEstimate) -> None:
        """Take in the estimate of another part of the stream; raises ValueError if its shape is another."""
        if (other.mean.shape, other.scatter.shape) != (self.mean.shape, self.scatter.shape):
            raise ValueError(f"estimate of shape {list(other.mean.shape)}: expected {list(self.mean.shape)}")
        device = self.mean.device
        self.scatter += other.scatter.to(device)
        self._combine(other.counts.to(device), other.mean.to(device), other.squares.to(device))

    def covariance(self) -> Tensor:
        """Population covariance within the groups, float64 [N, N]; NaN without rows."""
        return dense(self.scatter, self.features) / self.counts.sum()

    def state(self) -> dict[str, Tensor]:
        """All tensors by attribute name."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> GaussianEstimate:
        """The inverse of `state`; raises ValueError for a tensor that is missing or misshapen."""
        missing = [name for name in _FIELDS if name not in state]
        if missing or state["mean"].ndim != 2 or state["scatter"].ndim != 3 or not state["scatter"].shape[-1]:
            raise ValueError(f"expected the tensors {', '.join(_FIELDS)}, of a Gaussian estimate")
        groups, features = state["mean"].shape
        estimate = cls(features, groups, state["scatter"].shape[-1])
        for name, expected in estimate.state().items():
            found = state[name]
            if found.shape != expected.shape or found.dtype != expected.dtype:
                raise ValueError(
                    f"{name}: expected {expected.dtype} {list(expected.shape)}, found {found.dtype} {list(found.shape)}"
                )
            setattr(estimate, name, found)
        return estimate

    def _move(self, device: torch.device) -> None:
        if self.mean.device != device:
            for name, tensor in self.state().items():
                setattr(self, name, tensor.to(device))


class GaussianRows:
    """Draws rows X' = 1 mu^T + Z L^T from an estimate, L the Cholesky factor of its regularised covariance.

    The correlation is shrunk (`block_diagonal.regularised`), not the variances, so that outlier features keep theirs.
    A group without two rows takes the mean and variance of all.
    """

    def __init__(self, estimate: GaussianEstimate) -> None:
        counts = estimate.counts[:, None]
        total = counts.sum().clamp(min=1)
        pooled_mean = (estimate.mean * counts).sum(0) / total
        pooled_variance = estimate.squares.sum(0) / total
        seen = counts >= 2
        self._mean = torch.where(seen, estimate.mean, pooled_mean)
        variance = torch.where(seen, estimate.squares / counts.clamp(min=1), pooled_variance)
        self._deviation = variance.clamp(min=0).sqrt()
        samples = float(estimate.counts.sum() - (estimate.counts > 0).sum())  # a mean for each group was fitted
        correlation, _ = regularised(estimate.scatter / total, samples)
        self._factor = torch.linalg.cholesky(correlation)

    def draw(self, rows: int, group: int, generator: torch.Generator) -> Tensor:
        """Float32 [rows, N], on the generator's device."""
        shape = (rows, self._mean.shape[1])
        noise = torch.randn(shape, generator=generator, device=generator.device)
        factor, deviation, mean = (
            tensor.to(generator.device, torch.float32)
            for tensor in (self._factor, self._deviation[group], self._mean[group])
        )
        return mean + multiply(noise, factor) * deviation
