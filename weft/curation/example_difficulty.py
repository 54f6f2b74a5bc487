"""How hard an example is: EL2N, forgetting, and the distance to a prototype."""

from __future__ import annotations

import numpy as np

from weft.curation.k_means import k_means
from weft.curation.small_network import BATCH, SmallNetworks, standardized


def el2n_scores(
    features: np.ndarray,
    labels: np.ndarray,
    runs: int = 10,
    steps: int = 60,
    seed: int = 0,
) -> np.ndarray:
    """Return the EL2N score of each example, float64 ``[examples]``: hard examples have high scores.

    The score is the length of the error vector, ``||softmax - onehot||_2``, early in training (Paul et al. 2021,
    2107.07075). It is measured after ``steps`` steps, and averaged over ``runs`` networks. ``features``: float32
    ``[examples, width]``. ``labels``: int64 ``[examples]``. ``seed``: seed of the networks.
    """
    classes = int(labels.max()) + 1
    networks = SmallNetworks(features.shape[1], classes, runs, seed)
    inputs = standardized(features)
    networks.train(inputs, labels, steps)
    errors = networks.probabilities(inputs) - np.eye(classes)[labels]
    return np.asarray(np.linalg.norm(errors, axis=-1).mean(0))


def forgetting_counts(
    features: np.ndarray,
    labels: np.ndarray,
    runs: int = 5,
    epochs: int = 20,
    seed: int = 0,
) -> np.ndarray:
    """Return how often each example is forgotten in training, float64 ``[examples]`` (Toneva et al. 2019, 1812.05159).

    An example is forgotten when a network classifies it correctly after one epoch and wrongly after the next. The
    result is the mean over ``runs`` networks; an example that a network never classifies correctly counts as
    ``epochs``. For the other arguments see :func:`el2n_scores`.
    """
    networks = SmallNetworks(features.shape[1], int(labels.max()) + 1, runs, seed)
    inputs = standardized(features)
    per_epoch = max(1, -(-len(labels) // BATCH))
    right = np.zeros((runs, len(labels)), bool)
    ever = right.copy()
    forgotten = np.zeros((runs, len(labels)))

    def look(step: int) -> None:
        nonlocal right, ever, forgotten
        if step % per_epoch:
            return
        now = networks.probabilities(inputs).argmax(-1) == labels
        forgotten += right & ~now
        right, ever = now, ever | now

    networks.train(inputs, labels, per_epoch * epochs, look)
    return np.asarray(np.where(ever, forgotten, epochs).mean(0))


def prototype_distances(
    features: np.ndarray, clusters: int, seed: int = 0
) -> np.ndarray:
    """Return the distance of each example to the nearest of ``clusters`` centroids, 1 - cosine, float64 ``[examples]``.

    This measures difficulty without labels: examples far from all centroids are hard (Sorscher et al. 2022,
    2206.14486). ``seed``: seed of k-means.
    """
    clusters = max(1, min(clusters, len(features)))
    return k_means(features, clusters, seed, cosine=True).distances.astype(np.float64)
