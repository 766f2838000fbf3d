"""The matrix-normal model of a weight: row and column covariance by flip-flop, regularised and symmetrised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.probe.block_diagonal import block_width, multiply, regularised, shrinkage, split_blocks, whiten

TOLERANCE = 5e-3
MAX_ITERATIONS = 50
MAX_GROUPS = 8
"""Groups that the covariances are estimated from, evenly spaced; they say no more about 50 than about 8."""
MAX_ROW_BLOCKS = 4
ROW_BLOCK = 128
"""Output channels are estimated and drawn in blocks of a tile of fp8_block, at most four, evenly spaced: what makes an
error, a matrix has in all its rows."""
LEAST_SHARE = 0.05
"""Of shrinkage: below it the two covariances of a single matrix hardly determine each other."""
MIN_VARIANCE = 1e-12
"""Of a feature, relative to the mean one."""


@dataclass(frozen=True)
class MatrixNormal:
    """W_g = M_g + s_g R with R matrix normal: Cov(vec R) = V (x) U, both of mean variance 1.

    Attributes:
        mean: float64 [groups, in], M_g = 1 mean_g^T: with one sample of a matrix its mean needs a structure.
        scale: float64 [groups], root mean square of W_g - M_g.
        row_factor: lower Cholesky factors of U, float64 [blocks, rows, rows]: of some blocks of 128 outputs.
        column_factor: lower Cholesky factors of V [in, in], float64; `block_diagonal` says what wide inputs keep.
        iterations: flip-flop steps taken.
        change: largest relative change of U and V in the last one.
        converged: whether that is within tolerance.
    """

    mean: Tensor
    scale: Tensor
    row_factor: Tensor
    column_factor: Tensor
    iterations: int
    change: float
    converged: bool

    def draw(self, group: int, block: int, generator: torch.Generator) -> Tensor:
        """W' = M + L_U Z L_V^T, float32: the output rows of one block of U."""
        rows = self.row_factor.shape[-1]
        device = generator.device
        noise = torch.randn((rows, self.mean.shape[1]), generator=generator, device=device)
        row_factor = self.row_factor[block].to(device, torch.float32)
        drawn = row_factor @ multiply(noise, self.column_factor.to(device, torch.float32))
        return self.mean[group].to(device, torch.float32) + drawn * self.scale[group].to(device, torch.float32)


@torch.inference_mode()
def estimate_matrix_normal(
    weight: Tensor, tolerance: float = TOLERANCE, max_iterations: int = MAX_ITERATIONS
) -> MatrixNormal:
    """Fit a matrix normal by the flip-flop algorithm (Dutilleul, "The MLE algorithm for the matrix normal
    distribution", 1999): each covariance in turn from residuals whitened by the other, starting from diagonals.

    One matrix has no maximum-likelihood estimate, since either covariance can explain all of it. So every step
    symmetrises its correlations and shrinks them towards none, by a share that the number of samples calls for
    (`block_diagonal.shrinkage`, once, from residuals of unit variance): a weight without structure gives nearly
    identities. Each covariance is normalised to mean variance 1, for only their product is determined. Computed in
    float64, one group at a time.

    Args:
        weight: [out, in] or [groups, out, in], any float dtype.
        tolerance: largest relative Frobenius change of U and V that counts as converged.
    """
    stacked = weight if weight.ndim == 3 else weight[None]
    groups, _, in_features = stacked.shape
    mean = torch.stack([matrix.mean(0, dtype=torch.float64) for matrix in stacked])
    scale = torch.stack([_deviation(matrix, center) for matrix, center in zip(stacked, mean, strict=True)])
    chosen = [group * groups // min(groups, MAX_GROUPS) for group in range(min(groups, MAX_GROUPS))]
    residuals = _Residuals(stacked, mean, scale, [group for group in chosen if scale[group] > 0])
    rows = _Side(len(residuals.rows), residuals.row_block, True, weight.device)
    columns = _Side(in_features, block_width(in_features), False, weight.device)
    iterations, change = 0, 0.0
    if residuals.chosen:
        columns.start(residuals, rows.factor)
        rows.start(residuals, columns.factor)
        columns.set_share(residuals, rows.factor)
        rows.set_share(residuals, columns.factor)
        change = float("inf")
    while iterations < max_iterations and change > tolerance:
        change = max(rows.step(residuals, columns.factor), columns.step(residuals, rows.factor))
        iterations += 1
    converged = change <= tolerance
    return MatrixNormal(mean, scale, rows.factor, columns.factor, iterations, change, converged)


def _deviation(matrix: Tensor, mean: Tensor) -> Tensor:
    """Root mean square of a matrix around the mean of its columns, float64."""
    # A block of rows at a time: no float64 copy of all of it.
    squares = [(block.double() - mean).square_().sum() for block in matrix.split(ROW_BLOCK)]
    return (torch.stack(squares).sum() / matrix.numel()).sqrt()


class _Residuals:
    """(W_g - M_g) / s_g of the chosen groups and rows, made one group at a time.

    Attributes:
        chosen: groups.
        row_block: rows of a block.
        rows: int64, whole blocks of rows; a last one that is not whole is left out.
    """

    def __init__(self, stacked: Tensor, mean: Tensor, scale: Tensor, chosen: list[int]) -> None:
        self.chosen = chosen
        self._stacked, self._mean, self._scale = stacked, mean, scale
        out_features = stacked.shape[1]
        self.row_block = min(ROW_BLOCK, out_features)
        whole = out_features // self.row_block
        blocks = [block * whole // min(whole, MAX_ROW_BLOCKS) for block in range(min(whole, MAX_ROW_BLOCKS))]
        starts = torch.tensor(blocks, device=stacked.device) * self.row_block
        self.rows = (starts[:, None] + torch.arange(self.row_block, device=stacked.device)).flatten()

    def covariance(self, other_factor: Tensor, of_rows: bool, width: int) -> tuple[Tensor, int]:
        """Covariance of one side's features from residuals whitened by the other's factor, and the samples behind."""
        products: list[Tensor] = []
        samples = 0
        for group in self.chosen:
            residual = (self._stacked[group][self.rows].double() - self._mean[group]) / self._scale[group]
            white = whiten(residual if of_rows else residual.T, other_factor)  # [features, samples]
            blocks = split_blocks(white.T, width)
            products = [blocks.mT @ blocks + sum(products)]
            samples += white.shape[1]
        return products[0] / samples, samples


class _Side:
    """The covariance of the rows or of the columns, while it is estimated."""

    def __init__(self, features: int, width: int, of_rows: bool, device: torch.device) -> None:
        self._features, self._width, self._of_rows = features, width, of_rows
        self._covariance = torch.eye(width, dtype=torch.float64, device=device).repeat(-(-features // width), 1, 1)
        self._share = 1.0
        self.factor = self._covariance

    def start(self, residuals: _Residuals, other_factor: Tensor) -> None:
        """Variances alone, as `_share` is 1: the first correlations of one side must not swallow the other's sizes."""
        self.step(residuals, other_factor)

    def set_share(self, residuals: _Residuals, other_factor: Tensor) -> None:
        covariance, samples = residuals.covariance(other_factor, self._of_rows, self._width)
        correlation, _ = regularised(covariance, samples, share=0.0)
        self._share = max(LEAST_SHARE, shrinkage(correlation, samples))

    def step(self, residuals: _Residuals, other_factor: Tensor) -> float:
        """Estimate anew; gives the relative change."""
        covariance, samples = residuals.covariance(other_factor, self._of_rows, self._width)
        correlation, deviation = regularised(covariance, samples, self._share)
        variance = deviation.square()
        # A feature without variance, a dead one say, must not make the factor singular.
        variance = (variance / variance[: self._features].mean()).clamp(min=MIN_VARIANCE)
        scale = variance.sqrt().view(correlation.shape[:2])
        before, self._covariance = self._covariance, correlation * scale[:, :, None] * scale[:, None, :]
        self.factor = torch.linalg.cholesky(self._covariance)
        return float((self._covariance - before).norm() / before.norm())
