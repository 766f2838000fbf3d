"""Three-level semantic IDs: residual k-means over co-purchase embeddings mixed with the product hierarchy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linear_sum_assignment

Floats = NDArray[np.float64]
Derivation = Callable[[Floats, Floats, Sequence[int], np.random.Generator], NDArray[np.int32]]


def truncated_svd(matrix: sparse.csr_matrix, rank: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Left singular vectors [rows, rank] and singular values [rank] by randomized subspace iteration (Halko 2011)."""
    rank = min(rank, *matrix.shape)
    basis = matrix @ generator.standard_normal((matrix.shape[1], min(rank + 16, *matrix.shape)))
    for _ in range(4):
        basis = np.linalg.qr(matrix @ (matrix.T @ basis))[0]
    basis = np.linalg.qr(basis)[0]
    left, values, _ = np.linalg.svd((matrix.T @ basis).T, full_matrices=False)
    return (basis @ left)[:, :rank], values[:rank]


def unit_rows(vectors: Floats) -> Floats:
    """Rows scaled to length one; rows of zeros stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def positive_pointwise_mutual_information(counts: sparse.csr_matrix, smoothing: float = 0.75) -> sparse.csr_matrix:
    """PPMI of a symmetric co-occurrence matrix, context distribution smoothed as in Levy et al. 2015."""
    coordinates = counts.tocoo()
    totals = np.asarray(counts.sum(axis=1)).ravel()
    smoothed = totals**smoothing
    joint = coordinates.data / totals.sum()
    expected = (totals / totals.sum())[coordinates.row] * (smoothed / smoothed.sum())[coordinates.col]
    values = np.maximum(np.log(joint / expected), 0.0)
    return sparse.csr_matrix((values, (coordinates.row, coordinates.col)), shape=counts.shape)


def co_purchase_embeddings(
    items: NDArray[np.int32], groups: NDArray[np.int32], item_count: int, rank: int, generator: np.random.Generator
) -> Floats:
    """Unit rows [items, rank]: SVD of the PPMI of how many groups (baskets) hold both items. Unseen items are zero."""
    shape = (int(groups.max()) + 1, item_count)
    incidence = sparse.csr_matrix((np.ones(len(items)), (groups, items)), shape=shape)
    incidence.data[:] = 1.0
    together = (incidence.T @ incidence).tocsr()
    together.setdiag(0)
    together.eliminate_zeros()
    vectors, values = truncated_svd(positive_pointwise_mutual_information(together), rank, generator)
    return unit_rows(vectors * np.sqrt(values))


def household_embeddings(
    items: NDArray[np.int32], households: NDArray[np.int32], item_count: int, rank: int, generator: np.random.Generator
) -> Floats:
    """Unit rows [items, rank]: SVD of the household x item counts (log, inverse document frequency)."""
    shape = (int(households.max()) + 1, item_count)
    counts = sparse.csr_matrix((np.ones(len(items)), (households, items)), shape=shape)
    buyers = np.asarray((counts > 0).sum(axis=0)).ravel()
    weights = sparse.diags_array(np.log((1.0 + shape[0]) / (1.0 + buyers)))
    counts.data = np.log1p(counts.data)
    vectors, values = truncated_svd((counts @ weights).T.tocsr(), rank, generator)
    return unit_rows(vectors * np.sqrt(values))


def attribute_embeddings(values: Sequence[str], rank: int, generator: np.random.Generator) -> Floats:
    """Random unit row [items, rank] for each distinct value: a one-hot vector, projected. Missing values are zero."""
    distinct, codes = np.unique(np.asarray(values, dtype=np.str_), return_inverse=True)
    table = unit_rows(generator.standard_normal((len(distinct), rank)))
    table[distinct == ""] = 0.0
    return table[codes]


def k_means(
    vectors: Floats, clusters: int, weights: Floats, generator: np.random.Generator, rounds: int = 25
) -> tuple[NDArray[np.int32], Floats]:
    """Weighted Lloyd iterations; an empty cluster moves to the row that is farthest from its centroid.

    Returns codes int32 [rows] and centroids [clusters, width].
    """
    clusters = min(clusters, len(vectors))
    chosen = generator.choice(len(vectors), clusters, replace=False, p=weights / weights.sum())
    centroids = vectors[chosen].copy()
    squares = (vectors**2).sum(axis=1)
    codes = np.zeros(len(vectors), dtype=np.int32)
    for _ in range(rounds):
        distances = squares[:, None] - 2.0 * vectors @ centroids.T + (centroids**2).sum(axis=1)
        codes = distances.argmin(axis=1).astype(np.int32)
        members = sparse.csr_matrix((weights, (codes, np.arange(len(codes)))), shape=(clusters, len(codes)))
        mass = np.asarray(members.sum(axis=1)).ravel()
        centroids = (members @ vectors) / np.maximum(mass, 1e-12)[:, None]
        empty = np.flatnonzero(mass == 0)
        if len(empty):
            nearest = distances[np.arange(len(codes)), codes] * weights
            centroids[empty] = vectors[np.argsort(-nearest, kind="stable")[: len(empty)]]
    return codes, centroids


def assign_last_level(prefixes: NDArray[np.int32], distances: Floats) -> NDArray[np.int32]:
    """The last code of each item, distinct among the items of one prefix, at the least total distance.

    prefixes int32 [items, levels - 1]; distances [items, codebook size]. Raises ValueError where a prefix holds more
    items than the codebook has codes.
    """
    codes = np.empty(len(prefixes), dtype=np.int32)
    _, inverse, counts = np.unique(prefixes, axis=0, return_inverse=True, return_counts=True)
    if counts.max(initial=0) > distances.shape[1]:
        raise ValueError(f"a prefix holds {counts.max()} items, the last codebook only {distances.shape[1]} codes")
    order = np.argsort(inverse, kind="stable")
    for members in np.split(order, np.cumsum(counts)[:-1]):
        rows, columns = linear_sum_assignment(distances[members])
        codes[members[rows]] = columns
    return codes


def residual_semantic_ids(
    vectors: Floats, weights: Floats, codebook_sizes: Sequence[int], generator: np.random.Generator
) -> NDArray[np.int32]:
    """Residual k-means codes int32 [items, levels]; no two items share all codes."""
    residual, codes = vectors, []
    for size in codebook_sizes[:-1]:
        level_codes, centroids = k_means(residual, size, weights, generator)
        residual = residual - centroids[level_codes]
        codes.append(level_codes)
    _, centroids = k_means(residual, codebook_sizes[-1], weights, generator)
    distances = (residual**2).sum(axis=1)[:, None] - 2.0 * residual @ centroids.T + (centroids**2).sum(axis=1)
    codes.append(assign_last_level(np.stack(codes, axis=1), distances))
    return np.stack(codes, axis=1)


def shelf_order_semantic_ids(
    vectors: Floats, weights: Floats, codebook_sizes: Sequence[int], generator: np.random.Generator
) -> NDArray[np.int32]:
    """As `residual_semantic_ids`, but the last code says where in product-number order the item stands.

    Rows must be in product-number order. Few items share a prefix, so the last level has little left to say about
    co-purchase; the product number orders the items of a basket and groups what was introduced together.
    """
    residual, codes = vectors, []
    for size in codebook_sizes[:-1]:
        level_codes, centroids = k_means(residual, size, weights, generator)
        residual = residual - centroids[level_codes]
        codes.append(level_codes)
    quantile = np.arange(len(vectors)) * codebook_sizes[-1] / len(vectors) - 0.5
    distances = (quantile[:, None] - np.arange(codebook_sizes[-1])) ** 2
    codes.append(assign_last_level(np.stack(codes, axis=1), distances))
    return np.stack(codes, axis=1)
