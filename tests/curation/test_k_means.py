"""K-means: planted clusters come back, nothing depends on blocks, and every centroid is the mean of its members."""

from __future__ import annotations

import numpy as np
import pytest

from weft.curation import k_means as module
from weft.curation.k_means import k_means, unit_rows


def planted(clusters: int, each: int, width: int = 8, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centers = random.normal(size=(clusters, width)) * 10
    points = centers[:, None] + random.normal(size=(clusters, each, width)) * 0.1
    return points.reshape(-1, width).astype(np.float32)


@pytest.mark.parametrize("cosine", [False, True])
def test_planted_clusters_come_back(cosine: bool) -> None:
    labels = k_means(planted(6, 50), 6, cosine=cosine).labels.reshape(6, 50)
    assert (labels == labels[:, :1]).all() and len(set(labels[:, 0])) == 6


def test_ends_where_each_centroid_is_the_mean_of_its_members() -> None:
    points = np.random.default_rng(1).normal(size=(300, 5)).astype(np.float32)
    centroids, labels, distances = k_means(points, 7, rounds=200)
    means = np.stack([points[labels == c].mean(0) for c in range(7)])
    np.testing.assert_allclose(centroids, means, atol=1e-5)
    pairs = np.linalg.norm(points[:, None] - centroids, axis=2)
    np.testing.assert_allclose(distances, pairs.min(1), atol=1e-5)
    assert np.array_equal(labels, pairs.argmin(1))


def test_same_seed_same_result_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    points = planted(5, 40, seed=2).astype(np.float16)
    first = k_means(points, 5, seed=3)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(first, k_means(points, 5, seed=3), strict=True)
    )
    monkeypatch.setattr(module, "BLOCK_ROWS", 33)
    assert np.array_equal(first.labels, k_means(points, 5, seed=3).labels)


def test_a_sample_finds_the_same_clusters() -> None:
    points = planted(4, 200, seed=4)
    labels = k_means(points, 4, sample_per_cluster=20).labels.reshape(4, 200)
    assert (labels == labels[:, :1]).all()


def test_equal_vectors_and_zeros() -> None:
    clustering = k_means(np.ones((5, 3)), 3)
    assert clustering.centroids.shape == (3, 3) and not clustering.distances.any()
    zeros = k_means(np.zeros((4, 3)), 2, cosine=True)
    assert np.isfinite(zeros.centroids).all()
    assert k_means(np.zeros((0, 3)), 1).labels.shape == (0,)
    with pytest.raises(ValueError, match="3 clusters of 2 vectors"):
        k_means(np.ones((2, 3)), 3)
    np.testing.assert_allclose(np.linalg.norm(unit_rows(planted(2, 5)), axis=1), 1)
