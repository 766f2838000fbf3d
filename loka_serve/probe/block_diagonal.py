"""Block-diagonal covariances: neighbouring features stay correlated, blocks are independent of each other.

A matrix of width N is a stack ``[blocks, width, width]``; the last block is padded where N is no multiple of its width.
N^2 figures become N * width, and every product and factorisation is batched over the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL_WIDTH = 512
BLOCK_WIDTH = 128
MIN_SHRINKAGE = 1e-6


def block_width(features: int) -> int:
    """One block of all features up to 512 (2 MiB in float64); beyond that blocks of 128, as fp8_block scales."""
    return features if features <= FULL_WIDTH else BLOCK_WIDTH


def split_blocks(rows: Tensor, width: int) -> Tensor:
    """Rows [M, N] as [blocks, M, width], zeros where the last block is short."""
    padding = -rows.shape[1] % width
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    return rows.unflatten(1, (-1, width)).transpose(0, 1)


def join_blocks(blocks: Tensor, features: int) -> Tensor:
    """The inverse of `split_blocks`: [M, features]."""
    return blocks.transpose(0, 1).flatten(1)[:, :features]


def multiply(rows: Tensor, factor: Tensor) -> Tensor:
    """rows L^T for rows [M, N] and blocks L [blocks, width, width]: gives standard normal rows covariance L L^T."""
    return join_blocks(split_blocks(rows, factor.shape[-1]) @ factor.mT, rows.shape[1])


def whiten(rows: Tensor, factor: Tensor) -> Tensor:
    """rows L^-T for rows [M, N] and lower triangular blocks L: undoes `multiply`."""
    blocks = split_blocks(rows, factor.shape[-1])
    solved = torch.linalg.solve_triangular(factor.mT, blocks, upper=True, left=False)
    return join_blocks(solved, rows.shape[1])


def dense(blocks: Tensor, features: int) -> Tensor:
    """The whole matrix [features, features]."""
    return torch.block_diag(*blocks)[:features, :features]


def shrinkage(blocks: Tensor, samples: float) -> float:
    """How far to pull a sample covariance towards a scaled identity: the OAS estimate, 1e-6 to 1.

    It is the share that minimises the expected squared error for Gaussian data, from the covariance itself (Chen,
    Wiesel, Eldar and Hero, "Shrinkage algorithms for MMSE covariance estimation", 2010, equation 23).

    Args:
        blocks: [blocks, width, width], symmetric.
        samples: rows that it was estimated from.
    """
    features = blocks.shape[0] * blocks.shape[-1]
    trace = float(blocks.diagonal(dim1=1, dim2=2).sum())
    squares = float(blocks.square().sum())
    spread = squares - trace**2 / features
    if samples < 1 or spread <= 0:
        return 1.0
    share = ((1 - 2 / features) * squares + trace**2) / ((samples + 1 - 2 / features) * spread)
    return min(1.0, max(MIN_SHRINKAGE, share))


def regularised(blocks: Tensor, samples: float, share: float | None = None) -> tuple[Tensor, Tensor]:
    """A covariance as correlations and standard deviations, the correlations symmetrised and shrunk towards none.

    The variances stay as they are: features a thousand times the others, which precision hangs on, keep their size and
    the small ones beside them theirs. Correlations of features without variance, and of padding, are those of the
    identity, so that the result is positive definite.

    Args:
        blocks: [blocks, width, width], a sample covariance.
        samples: rows that it was estimated from.
        share: how far to shrink, instead of `shrinkage`.

    Returns:
        correlations [blocks, width, width] and standard deviations [blocks * width].
    """
    variance = blocks.diagonal(dim1=1, dim2=2).clamp(min=0)
    inverse = torch.where(variance > 0, variance.rsqrt(), 0)
    correlation = (blocks + blocks.mT) / 2 * inverse[:, :, None] * inverse[:, None, :]
    correlation.diagonal(dim1=1, dim2=2).fill_(1)
    share = shrinkage(correlation, samples) if share is None else share
    correlation *= 1 - share
    correlation.diagonal(dim1=1, dim2=2).fill_(1)
    return correlation, variance.sqrt().flatten()
