"""Density-based pruning: how many documents each cluster keeps (Abbas et al. 2024, 2401.04578).

Dense clusters close to others say the same again and again, and keep few documents; wide clusters far from others keep
many. The targets are a projection onto a simplex with bounds, so no solver of quadratic programs is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.curation.k_means import k_means


class PrunedClusters(NamedTuple):
    """Clusters of documents, and which documents are kept.

    Attributes:
        ``labels``: index of each document's cluster, ``[documents]``.
        ``distances``: distance of each document to its centroid, 1 - cosine, ``[documents]``.
        ``complexities``: complexity of each cluster (:func:`cluster_complexity`), ``[clusters]``.
        ``counts``: number of documents that each cluster keeps, ``[clusters]``.
        ``kept``: whether each document is kept, bool ``[documents]``.
    """

    labels: np.ndarray
    distances: np.ndarray
    complexities: np.ndarray
    counts: np.ndarray
    kept: np.ndarray


def cluster_complexity(
    centroids: np.ndarray, labels: np.ndarray, distances: np.ndarray, nearest: int = 20
) -> np.ndarray:
    """Return the complexity of each cluster, ``[clusters]``: mean distance of its documents to its centroid, times mean
    distance of its centroid to the nearest others.

    ``centroids``: of length 1, ``[clusters, width]``. ``labels``: index of each document's cluster, ``[documents]``.
    ``distances``: distance of each document to its centroid, 1 - cosine, ``[documents]``. ``nearest``: number of
    nearest other centroids whose distances are averaged. A cluster without documents has complexity 0.
    """
    count = len(centroids)
    sizes = np.bincount(labels, minlength=count)
    inside = np.bincount(labels, distances, count) / np.maximum(sizes, 1)
    if count < 2:
        return np.zeros(count)
    units = centroids.astype(np.float64)
    apart = 1 - units @ units.T
    np.fill_diagonal(apart, np.inf)
    neighbours = min(nearest, count - 1)
    between = np.sort(apart, axis=1)[:, :neighbours].mean(1)
    return np.asarray(inside * np.maximum(between, 0))


def target_counts(
    complexities: np.ndarray, sizes: np.ndarray, total: int, temperature: float = 0.5
) -> np.ndarray:
    """Return how many documents each cluster keeps, ``[clusters]``: whole numbers whose sum is ``total``.

    ``complexities``, ``sizes``: complexity and number of documents of each cluster, ``[clusters]``. The wanted shares
    are the softmax of the complexities divided by ``temperature``. Each cluster keeps at least half of ``total /
    clusters`` documents, or all but one if it has fewer, and at most its ``sizes``. Within these bounds, the counts
    have the least sum of squared distances from the wanted shares of ``total``.
    """
    logits = complexities / temperature
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    low = np.minimum(0.5 * total / len(sizes), np.maximum(sizes - 1, 0))
    return project_counts(total * shares, np.floor(low), sizes, total)


def project_counts(
    wanted: np.ndarray, low: np.ndarray, high: np.ndarray, total: int
) -> np.ndarray:
    """Return the whole numbers closest to ``wanted`` whose sum is ``total``, each between its ``low`` and ``high``.

    Closest means the least sum of squares. The solution is ``clip(wanted + shift, low, high)`` with one shift for all,
    which is found by bisection, and then rounded by largest remainders. The bounds are whole numbers. Raises
    :class:`ValueError` if no such numbers have this sum.
    """
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    if not low.sum() <= total <= high.sum():
        raise ValueError(
            f"no counts between {low.sum():g} and {high.sum():g} sum to {total}"
        )
    below, above = (low - wanted).min() - 1, (high - wanted).max() + 1
    for _ in range(100):
        shift = (below + above) / 2
        if np.clip(wanted + shift, low, high).sum() < total:
            below = shift
        else:
            above = shift
    exact = np.clip(wanted + above, low, high)
    # what bisection leaves open is spread over those that can still move
    free = (exact > low) & (exact < high)
    if free.any():
        exact[free] += (total - exact.sum()) / free.sum()
        exact = np.clip(exact, low, high)
    # a remainder of 1 - 1e-12 is a whole number
    whole = np.floor(exact + 1e-9)
    return _rounded(whole, exact - whole, low, high, total)


def _rounded(
    whole: np.ndarray,
    remainders: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    total: int,
) -> np.ndarray:
    """Return ``whole`` with one more for the largest remainders, so that the sum is ``total``."""
    counts = whole.astype(np.int64)
    order = np.argsort(-remainders, kind="stable")
    missing = total - int(counts.sum())
    step = 1 if missing > 0 else -1
    able = order if missing > 0 else order[::-1]
    for i in able:
        if missing == 0:
            break
        if low[i] <= counts[i] + step <= high[i]:
            counts[i] += step
            missing -= step
    return counts


def prune_clusters(
    vectors: np.ndarray,
    total: int,
    clusters: int,
    temperature: float = 0.5,
    nearest: int = 20,
    seed: int = 0,
    first: np.ndarray | None = None,
) -> PrunedClusters:
    """Cluster documents by their vectors, and choose ``total`` of them: from each cluster those farthest from its
    centroid.

    Arguments:
        ``vectors``: a vector for each document, ``[documents, width]``, sorted by the documents' ids. This order
            decides between documents at equal distance.
        ``total``: number of documents to keep.
        ``clusters``: number of clusters; at most one for each document is made.
        ``temperature``: see :func:`target_counts`.
        ``nearest``: see :func:`cluster_complexity`.
        ``seed``: seed of k-means.
        ``first``: a number for each document. If given, the documents with the highest numbers in their cluster are
            kept, and not the farthest.
    """
    grouped = k_means(vectors, max(1, min(clusters, len(vectors))), seed, cosine=True)
    sizes = np.bincount(grouped.labels, minlength=len(grouped.centroids))
    complexities = cluster_complexity(*grouped, nearest)
    counts = target_counts(complexities, sizes, total, temperature)
    first = grouped.distances if first is None else first
    kept = keep_of_clusters(grouped.labels, counts, first)
    return PrunedClusters(grouped.labels, grouped.distances, complexities, counts, kept)


def keep_of_clusters(
    labels: np.ndarray, counts: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Return which documents are kept, bool ``[documents]``: in each cluster the documents with the highest ``first``.

    ``labels``: index of each document's cluster, ``[documents]``. ``counts``: number of documents that each cluster
    keeps, ``[clusters]``. ``first``: a number for each document, ``[documents]``; of equal numbers the earlier document
    is kept.
    """
    order = np.lexsort((-first, labels))
    sizes = np.bincount(labels, minlength=len(counts))
    starts = np.cumsum(sizes) - sizes
    places = np.arange(len(labels)) - starts[labels[order]]
    kept = np.zeros(len(labels), bool)
    kept[order] = places < counts[labels[order]]
    return kept
