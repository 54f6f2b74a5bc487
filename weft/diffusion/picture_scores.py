"""How good images are, without a network of others: a classifier of pixels, and a Frechet distance of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.data.pictures import PictureSet

#: Steps of gradient descent that train the classifier, and the weight of its penalty.
STEPS, DECAY = 300, 1e-3
#: Pixels above which images are made smaller before they are compared.
MOST_VALUES = 1024


class PictureScores(NamedTuple):
    """Quality of sampled images.

    ``accuracy``: share of the images that a classifier assigns to their class. ``frechet``: Frechet distance between
    their pixels and those of real images.
    """

    accuracy: float
    frechet: float


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Frechet distance of the sets of vectors ``first`` and ``second``, each ``[n, values]``, taken as
    Gaussian (Dowson & Landau 1982).
    """
    means = first.mean(0), second.mean(0)
    a, b = (np.cov(x, rowvar=False) for x in (first, second))
    # the trace of the root of a b is the sum of the roots of the eigenvalues of root(a) b root(a)
    values, vectors = np.linalg.eigh(a)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    crossed = np.linalg.eigvalsh(root @ b @ root).clip(0)
    between = np.square(means[0] - means[1]).sum()
    return float(between + np.trace(a) + np.trace(b) - 2 * np.sqrt(crossed).sum())


@dataclass(frozen=True)
class PictureJudge:
    """Scores sampled images against the real images ``real``, by a small classifier and by a Frechet distance."""

    real: PictureSet

    @cached_property
    def weights(self) -> np.ndarray:
        """Weights of a logistic regression on the real images, float64 ``[values + 1, classes]``."""
        x = with_bias(self.seen_in(self.real.pixels))
        y = np.eye(len(self.real.classes))[self.real.labels]
        weights = np.zeros((x.shape[1], y.shape[1]))
        speed = np.zeros_like(weights)
        rate = 4 / np.square(x).sum(1).mean()
        for _ in range(STEPS):
            ahead = weights + 0.9 * speed
            gradient = x.T @ (_softmax(x @ ahead) - y) / len(x) + DECAY * ahead
            speed = 0.9 * speed - rate * gradient
            weights += speed
        return weights

    def seen_in(self, pixels: np.ndarray) -> np.ndarray:
        """Return the classifier's input for images or videos, ``[images, values]``.

        For images these are the pixels. For videos they are the mean amplitudes of spatial frequencies over the frames,
        which do not depend on where a moving thing is.
        """
        if pixels.ndim == 4:
            return self.values_of(pixels)
        waves = np.abs(np.fft.rfft2(pixels, norm="ortho")).mean(2)
        return self.values_of(waves)

    def values_of(self, pixels: np.ndarray) -> np.ndarray:
        """Flatten the images ``pixels`` to vectors ``[images, values]``, float64.

        Of images with more than :data:`MOST_VALUES` values, only every k-th row and column is used.
        """
        every = 1
        while pixels[0, ..., ::every, ::every].size > MOST_VALUES:
            every += 1
        return pixels[..., ::every, ::every].reshape(len(pixels), -1).astype(np.float64)

    def score(self, images: np.ndarray, labels: np.ndarray) -> PictureScores:
        """Return accuracy and Frechet distance of ``images``. ``labels``: their classes ``[images]``."""
        values = self.values_of(images)
        accuracy = 0.0
        if self.real.classes:
            seen = with_bias(self.seen_in(images))
            chosen = (seen @ self.weights).argmax(1)
            accuracy = float((chosen == labels).mean())
        real = self.values_of(self.real.pixels)
        return PictureScores(accuracy, frechet_distance(real, values))


def with_bias(x: np.ndarray) -> np.ndarray:
    """Return ``x`` ``[n, values]`` with a further column of ones, as the input of a linear model with a bias."""
    return np.concatenate([x, np.ones((len(x), 1))], 1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    shares: np.ndarray = e / e.sum(1, keepdims=True)
    return shares
