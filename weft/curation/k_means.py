"""K-means: clusters of vectors, in Euclidean or in cosine distance, the same on every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

#: Rows of a block. It is fixed, so that a result does not depend on the memory at hand.
BLOCK_ROWS = 4096


class Clustering(NamedTuple):
    """Result of k-means.

    Attributes:
        ``centroids``: centroid of each cluster, float32 ``[clusters, width]``; with cosine distances they have length
            1.
        ``labels``: index of each vector's cluster, ``[vectors]``.
        ``distances``: distance of each vector to its centroid, Euclidean or 1 - cosine, ``[vectors]``.
    """

    centroids: np.ndarray
    labels: np.ndarray
    distances: np.ndarray


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Return ``vectors``, ``[vectors, width]``, with rows scaled to length 1, as float32. A row of zeros stays zero."""
    rows = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def k_means(
    vectors: np.ndarray,
    clusters: int,
    seed: int = 0,
    *,
    rounds: int = 30,
    cosine: bool = False,
    sample_per_cluster: int = 256,
) -> Clustering:
    """Divide ``vectors`` into clusters by Lloyd's algorithm, with initial centroids by k-means++ (Arthur and
    Vassilvitskii 2007; Dhillon and Modha 2001).

    Arguments:
        ``vectors``: ``[vectors, width]``. Their order decides the random choices, so callers sort them by document ids.
        ``clusters``: number of clusters; at most one for each vector is made.
        ``seed``: seed of the random choices.
        ``rounds``: largest number of steps; the algorithm ends earlier when no vector changes its cluster.
        ``cosine``: whether the distance is 1 - cosine and centroids have length 1 (spherical k-means), not Euclidean.
        ``sample_per_cluster``: centroids are computed from a random sample of this many vectors for each cluster, if
            there are more.
    """
    vectors = np.asarray(vectors)
    if not 1 <= clusters <= max(len(vectors), 1):
        raise ValueError(f"{clusters} clusters of {len(vectors)} vectors")
    if not len(vectors):
        width = vectors.shape[1] if vectors.ndim > 1 else 0
        empty = np.zeros(0, np.float32)
        return Clustering(np.zeros((1, width), np.float32), empty.astype(int), empty)
    random = np.random.default_rng(seed)
    most = clusters * sample_per_cluster
    sample = vectors
    if len(vectors) > most:
        sample = vectors[np.sort(random.choice(len(vectors), most, replace=False))]
    sample = _rows(sample, cosine)
    centroids = _spread(sample, clusters, random)
    labels = np.full(len(sample), -1)
    for _ in range(rounds):
        nearest, squares = _nearest(sample, centroids, cosine)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
        centroids = _means(sample, labels, squares, centroids, cosine)
    labels, squares = _nearest(vectors, centroids, cosine)
    # vectors of length 1: half the squared distance is 1 - cosine
    distances = squares / 2 if cosine else np.sqrt(squares)
    return Clustering(centroids, labels, distances)


def _rows(vectors: np.ndarray, cosine: bool) -> np.ndarray:
    return unit_rows(vectors) if cosine else np.asarray(vectors, np.float32)


def _blocks(vectors: np.ndarray) -> Iterator[slice]:
    """Yield the slices of ``vectors`` that are computed at once."""
    for start in range(0, len(vectors), BLOCK_ROWS):
        yield slice(start, start + BLOCK_ROWS)


def _nearest(
    vectors: np.ndarray, centroids: np.ndarray, cosine: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each vector's nearest centroid, the first one if several are, and its squared distance."""
    labels = np.empty(len(vectors), np.int64)
    squares = np.empty(len(vectors), np.float32)
    halves = (centroids**2).sum(1) / 2
    for block in _blocks(vectors):
        rows = _rows(vectors[block], cosine)
        labels[block] = np.argmin(halves - rows @ centroids.T, axis=1)
        # from the difference itself, as a difference of two large products would lose the small distances
        squares[block] = ((rows - centroids[labels[block]]) ** 2).sum(1)
    return labels, squares


def _spread(
    sample: np.ndarray, clusters: int, random: np.random.Generator
) -> np.ndarray:
    """Return first centroids as k-means++ draws them: each with a probability by its squared distance to the others."""
    chosen = [int(random.integers(len(sample)))]
    squares = ((sample - sample[chosen[0]]) ** 2).sum(1)
    while len(chosen) < clusters:
        sums = np.cumsum(squares, dtype=np.float64)
        # all that is left equals a centroid: any vector that is none of them
        if sums[-1] > 0:
            point = int(np.searchsorted(sums, random.random() * sums[-1], "right"))
            point = min(point, len(sample) - 1)
        else:
            point = int(np.setdiff1d(np.arange(len(sample)), chosen)[0])
        chosen.append(point)
        squares = np.minimum(squares, ((sample - sample[point]) ** 2).sum(1))
    return sample[chosen].copy()


def _means(
    sample: np.ndarray,
    labels: np.ndarray,
    squares: np.ndarray,
    before: np.ndarray,
    cosine: bool,
) -> np.ndarray:
    """Return the mean of each cluster's vectors.

    An empty cluster gets the vector that is farthest from its centroid. ``squares``: squared distance of each vector;
    ``before``: the centroids of the last round, which stay where a mean has no direction.
    """
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=len(before))
    filled = np.flatnonzero(sizes)
    starts = (np.cumsum(sizes) - sizes)[filled]
    centroids = before.copy()
    sums = np.add.reduceat(sample[order], starts, axis=0, dtype=np.float64)
    centroids[filled] = sums / sizes[filled, None]
    empty = np.flatnonzero(sizes == 0)
    centroids[empty] = sample[np.argsort(-squares, kind="stable")[: len(empty)]]
    if cosine:
        lengths = np.linalg.norm(centroids, axis=1)
        centroids = np.where(lengths[:, None] > 1e-12, unit_rows(centroids), before)
    return centroids
